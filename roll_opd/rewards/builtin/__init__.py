"""The built-in rewards: one a module, of the same name."""
