"""Advice on the schedule: step times, simulated for other splits of devices and other age bounds."""
