"""The workflows that come with the package: the name of a module is that of its workflow."""
