"""ROLL compatibility: unsupported pipelines, policy loss variants."""
