"""Shared utilities that every package may import: registry, errors, paths, terminal. Their only import is pydantic."""
