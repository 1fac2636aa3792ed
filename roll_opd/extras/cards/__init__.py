"""Model cards: a run hook writes one next to the model of every checkpoint."""
