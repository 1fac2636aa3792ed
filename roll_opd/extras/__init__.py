"""Rooms of parts that are not on-policy distillation. The core finds them by their entry points, and imports none."""
