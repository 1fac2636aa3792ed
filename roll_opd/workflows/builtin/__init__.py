"""The workflows that come with the package."""
