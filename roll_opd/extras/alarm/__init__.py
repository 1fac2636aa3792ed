"""Alarms for a run that degrades: a run hook tests the metrics of every step."""
