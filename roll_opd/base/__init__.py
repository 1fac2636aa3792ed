"""What every room may import: registries, errors, text, paths, hardware. Standard library and pydantic."""
