"""Built-in rewards; each module has the name of its reward."""
