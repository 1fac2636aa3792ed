"""Built-in rewards, one per module of the same name."""
