"""Commands that use the model of a run: `chat`, `generate` and `push`."""
