"""Make the report of a run from its run directory.

The report is one HTML file, which opens without a server and without a network.
"""
