"""Shared utilities that every package may import: registry, errors, paths, terminal. Imports only pydantic."""
