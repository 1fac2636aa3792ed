"""Rows of `algorithm_type`. Does not import torch."""

from roll_opd.objective.algorithms import Algorithm

RLOO = Algorithm("ppo", "rloo")
OPMD = Algorithm("opmd", "opmd")
ASYMRE = Algorithm("opmd", "asymre", kl_loss=None)
TOPR = Algorithm("topr", "reinforce")
CISPO = Algorithm("cispo", "grpo")
GSPO = Algorithm("gspo", "grpo")
SAPO = Algorithm("sapo", "grpo")
MIX = Algorithm("mix", "grpo", repeat=8, expert_data_ratio=0.5)
MIX_CHORD = Algorithm("mix_chord", "grpo", repeat=8, expert_data_ratio=0.5)
SPPO = Algorithm("sppo", "opmd", kl_loss=None)
REC = Algorithm("rec", "rec")
MULTI_STEP_GRPO = Algorithm("ppo", "step_wise_grpo", repeat=8)
