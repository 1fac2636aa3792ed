"""Shared utilities: registry, errors, paths, terminal.

Every package may import them. They import no package except pydantic.
"""
