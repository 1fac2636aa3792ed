"""Facts and calculations for a plan, without torch and without starting anything.

Model directories (`model_info`, `weight_files`, `tokenizer_files`, `families`) and installed engines (`engine_fields`)
give the facts. The calculations are memory and layouts (`memory`, `layouts`), the order and the ages of groups if
generation runs ahead of training (`group_window`), phases of roles that share devices (`device_phases`), and predicted
step times (`async_simulator`, `async_advice`).
"""
