"""Translations of configurations that are written for other projects."""
