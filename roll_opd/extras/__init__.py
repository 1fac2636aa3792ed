"""What is not distillation: each package here registers its parts as a package of a user does."""
