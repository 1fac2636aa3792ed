"""The report of a run: one HTML file, made from the run's directory alone, that opens without a server or a network."""
