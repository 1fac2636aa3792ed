"""`Sample`: one sequence for an engine, with the arrays that a forward pass or a loss reads.

Legend: T tokens in all, P prompt tokens, L layers with experts, K experts of a token. Entry t of every [T-P] column
belongs to token `tokens[P+t]`.

| column | dtype | filled by | read by |
|---|---|---|---|
| `mask` | bool | `objective.columns` | losses: tokens that the update learns from |
| `weight` | f32 | `objective.columns` | losses: the token's part of the mean over the mini-batch |
| `advantages` | f32 | `objective.columns` | policy loss: advantage of the external reward; 0 in pure distillation |
| `opd_coefficients`, `opd_teacher` | f32 | `objective.columns` | policy loss: see `algorithms.opd` |
| `actions` | bool | `objective.columns` | policy loss: action tokens that `opd_kl_discount` counts |
| `demonstration` | bool | `objective.columns` | policy loss: tokens of demonstrations |
| `old_logprobs`, `ref_logprobs`, `rewards`, `importance_weights` | f32 | `objective.columns` | policy and KL loss |
| `TEACHER/share` | f32 | `objective.columns` | distillation loss: the teacher's coefficient, 0 off its samples |
| `TEACHER/topk_ids`, `/topk_logprobs`, `/topk_rest`, `/hidden` | | `teachers.target_refs` | distillation loss |
| `old_values`, `returns` | f32 | `objective.columns` | value loss |
| `topk_ids` | int32 [T-P, K] | `MegatronEngine.compute_targets` | log-probs at given tokens |
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Sample:
    """One sequence for an engine: T tokens, P of them prompt, and its columns by name."""

    tokens: np.ndarray  # int64 [T]
    prompt_length: int  # P >= 1
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # each [T-P] or [T-P, K]
    routes: np.ndarray | None = None  # integer [T-1, L, K], the experts of each token in each layer

    def empty(self) -> "Sample":
        """Return a sample with the same columns and no scored token: a template of array names, dtypes and shapes."""
        columns = {name: values[:0] for name, values in self.columns.items()}
        return Sample(self.tokens[:1], 1, columns, None if self.routes is None else self.routes[:0])
