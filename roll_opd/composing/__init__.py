"""From a configuration's files and overrides to plain values, and where each was written."""
