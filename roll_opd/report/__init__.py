"""Report of a run: one HTML file, made from the run directory, that opens without a server or a network."""
