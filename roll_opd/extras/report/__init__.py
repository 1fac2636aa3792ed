"""The report of a run: one HTML file, made from the run directory, which opens without a server and without a network.

The room adds a command and a run hook.
"""
