"""Model facts, engine facts and calculations for the plan of a run.

This package does not import torch and starts no processes.

Model directories (`model_info`, `weight_files`, `tokenizer_files`, `families`) and installed engines (`engine_fields`)
give the facts. The modules with calculations are `memory` and `layouts`, `group_window` (order and ages of groups if
generation runs ahead of training), `device_phases` (phases of roles that share devices), and `async_simulator` and
`async_advice` (predicted step times).
"""
