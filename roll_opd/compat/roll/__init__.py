"""What configurations of ROLL have beside ours: keys, names, pipelines."""
