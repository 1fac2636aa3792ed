"""Words of other tools: hints for people who know TRL, verl, NeMo-RL or axolotl."""
