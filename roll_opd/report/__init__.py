"""Report of a run: one HTML file that opens without a server or a network. It is made from the run directory."""
