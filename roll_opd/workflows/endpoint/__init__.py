"""The policy at an address that OpenAI's clients know."""
