"""Model facts, engine facts, and calculations for the plan of a run.

This package does not import torch. Only `engine_options` starts a process: a subprocess that reads the options of
engines.

- Facts of model directories: `model_info`, `model_files`, `weight_files`, `tokenizer_files`, `tokenizer_comparison`,
  `families`
- Facts of installed engines: `engine_options`
- Memory and sharding: `memory`, `layouts`
- Phases of roles that share devices: `device_phases`
"""
