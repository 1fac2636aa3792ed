"""Servers with scripted behaviour."""

from scripted_server import serve  # noqa: F401  # a fixture
