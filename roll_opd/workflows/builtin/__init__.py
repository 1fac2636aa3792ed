"""Built-in workflows and reward functions."""
