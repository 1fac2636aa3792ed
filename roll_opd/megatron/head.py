"""What a model ends in: hidden states at the scored positions and the output embedding, never logits.

Legend: M scored tokens, m of them that this context rank predicts, K tokens asked for at each, E and F hidden sizes of
student and teacher, V vocabulary columns on this rank, W of the whole vocabulary.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.algorithms.divergences import ColumnSum
from roll_opd.megatron.context import TokenOwners
from roll_opd.megatron.divergence import shard_of_head, vocab_parallel_divergence, vocab_parallel_entropy
from roll_opd.megatron.logprobs import vocab_parallel_logprobs, vocab_parallel_topk


@dataclass(frozen=True)
class TeacherHead:
    """A teacher's output embedding, cut to the vocabulary columns that this rank of the student holds."""

    weight_VF: Tensor
    vocab_size: int  # real columns of the teacher


@dataclass(frozen=True)
class OutputHead:
    """The end of the last pipeline stage. Every method is collective over the tensor and the context ranks.

    All take and return what belongs to all M tokens, however these are spread over context ranks.
    """

    hidden_mE: Tensor
    weight_VE: Tensor
    targets_m: Tensor  # int64, the tokens that the hidden states predict
    temperature: float
    vocab_size: int
    group: dist.ProcessGroup
    cut: TokenOwners | None = None  # None: m is M
    fills_buffer: bool = True  # False: the weight's gradient goes through autograd, which says when it is there

    @property
    def device(self) -> torch.device:
        """The device of the hidden states; Megatron's schedule reads it from a stage's output."""
        return self.hidden_mE.device

    def hidden(self) -> Tensor:
        """Return the states before the scored tokens, [M, E]."""
        return self._whole(self.hidden_mE)

    def logprobs(self) -> Tensor:
        """Return log-probs of the scored tokens, f32 [M]."""
        settings = {**self._settings, **self._buffer}
        return self._whole(vocab_parallel_logprobs(self.hidden_mE, self.weight_VE, self.targets_m, **settings))

    def logprobs_with_rest(self, ids_MK: Tensor) -> Tensor:
        """Return log-probs of the tokens `ids_MK`, int64, and last of all others together, f32 [M, K+1]."""
        settings = {**self._settings, **self._buffer}
        ids_mK = self._mine(ids_MK)
        return self._whole(vocab_parallel_logprobs(self.hidden_mE, self.weight_VE, ids_mK, with_rest=True, **settings))

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return the `k` most likely tokens: ids int64 [M, K] and log-probs f32 [M, K+1], as `logprobs_with_rest`."""
        ids_mK, logprobs_mL = vocab_parallel_topk(self.hidden_mE, self.weight_VE, k, **self._settings)
        return self._whole(ids_mK), self._whole(logprobs_mL)

    def entropy(self) -> Tensor:
        """Return the entropy of the next token, f32 [M]."""
        settings = {**self._settings, **self._buffer}
        return self._whole(vocab_parallel_entropy(self.hidden_mE, self.weight_VE, **settings))

    def divergence(self, teacher_hidden_MF: Tensor, teacher: TeacherHead, measure: ColumnSum) -> Tensor:
        """Return the divergence from a teacher, f32 [M], over the tokens that both vocabularies have.

        `teacher_hidden_MF` are the teacher's final hidden states at the same tokens.
        """
        settings = {**self._settings, **self._buffer, "vocab_size": min(self.vocab_size, teacher.vocab_size)}
        of_teacher = self._mine(teacher_hidden_MF), teacher.weight_VF
        return self._whole(vocab_parallel_divergence(self.hidden_mE, self.weight_VE, *of_teacher, measure, **settings))

    def within(self, vocab_size: int | None) -> "OutputHead":
        """Return this head over the first `vocab_size` tokens of the vocabulary; None: all."""
        return self if vocab_size is None else replace(self, vocab_size=min(self.vocab_size, vocab_size))

    def at(self, rows_R: Tensor) -> "OutputHead":
        """Return this head at R of its M tokens, int64 [R]."""
        rows_r = rows_R if self.cut is None else self.cut.mine_among(rows_R)
        return replace(
            self,
            hidden_mE=self.hidden_mE.index_select(0, rows_r),
            targets_m=self.targets_m[rows_r],
            cut=self.cut and self.cut.at(rows_R),
        )

    def _mine(self, values_M: Tensor) -> Tensor:
        return values_M if self.cut is None else values_M[self.cut.mine_M]

    def _whole(self, values_m: Tensor) -> Tensor:
        return values_m if self.cut is None else self.cut.whole(values_m)

    @property
    def _settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "vocab_size": self.vocab_size, "group": self.group}

    @cached_property
    def _buffer(self) -> dict[str, Any]:
        # where Megatron accumulates the gradient of a parameter that learns
        buffer = getattr(self.weight_VE, "main_grad", None) if self.fills_buffer else None
        return {} if buffer is None or buffer.dtype != torch.float32 else {"weight_grad_VE": buffer}


def whole_head(weight_VE: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Return the whole output embedding [W, E] on every rank of `group`, padding cut off. Collective."""
    pieces = [torch.empty_like(weight_VE) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, weight_VE.detach().contiguous(), group=group)
    return torch.cat(pieces)[:vocab_size]


def teacher_head(head_WF: Tensor, columns: int, group: dist.ProcessGroup, device: torch.device) -> TeacherHead:
    """Cut a teacher's whole output embedding to the `columns` that this rank of the student's `group` holds."""
    shard_VF = shard_of_head(head_WF, first=dist.get_rank(group) * columns, columns=columns)
    return TeacherHead(shard_VF.to(device), head_WF.size(0))
