"""Configurations of other tools: hints on their words, and refusals of ROLL's pipelines that do not exist here."""
