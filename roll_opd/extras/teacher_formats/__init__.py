"""Formats of teacher files that other programs write."""
