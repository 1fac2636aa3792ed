"""Built-in trackers, one per module of the same name."""
