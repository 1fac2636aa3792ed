"""Shared utilities that every package may import: registry, errors, paths, terminal. Standard library and pydantic."""
