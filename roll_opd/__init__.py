"""On-policy distillation of large language models: Megatron trains and scores, vLLM samples, Ray conducts.

Importing this package imports neither torch nor any engine and patches nothing.
"""

__version__ = "0.1.0"
