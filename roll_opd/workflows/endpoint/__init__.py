"""OpenAI-compatible HTTP endpoint of the policy."""
