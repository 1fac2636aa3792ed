"""The built-in trackers: one a module, of the same name."""
