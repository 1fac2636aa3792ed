"""Output head of a model: the hidden states at scored positions and the output embedding, without logits.

Legend: M scored tokens, m of them predicted by this context rank, K requested tokens per position, E hidden size of the
student, F hidden size of the teacher, V vocabulary columns on this rank, W columns of the whole vocabulary.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from roll_opd.megatron.logprobs_and_topk import vocab_parallel_logprobs, vocab_parallel_moments, vocab_parallel_topk
from roll_opd.megatron.packing import TokenOwners
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.megatron.whole_vocabulary_divergence import (
    shard_of_head,
    vocab_parallel_divergence,
    vocab_parallel_entropy,
)
from roll_opd.objective.divergences import ColumnSum


@dataclass(frozen=True)
class TeacherHead:
    """One rank's shard of a teacher's output embedding.

    The shard has the rows for the vocabulary columns of this rank of the student.
    """

    weight_VF: Tensor
    vocab_size: int  # tokens in the teacher's vocabulary, without padding
    logit_cap: float | None = None  # see `vocabulary.Columns.cap`


@dataclass(frozen=True)
class OutputHead:
    """Output of the last pipeline stage.

    Every method is collective over the tensor and context ranks. Arguments and results are for all M tokens, even if
    the tokens are split over context ranks.
    """

    hidden_mE: Tensor
    targets_m: Tensor  # int64, the tokens that the hidden states predict
    vocab: VocabShard
    owners: TokenOwners | None = None  # None: m is M

    @property
    def device(self) -> torch.device:
        """The device of the hidden states. Megatron's schedule reads this attribute of a stage's output."""
        return self.hidden_mE.device

    def hidden(self) -> Tensor:
        """Return the hidden states that predict the scored tokens, [M, E]."""
        return self._gather(self.hidden_mE)

    def logprobs(self) -> Tensor:
        """Return the log-probs of the scored tokens, f32 [M]."""
        return self._gather(vocab_parallel_logprobs(self.hidden_mE, self.vocab, self.targets_m))

    def logprobs_with_rest(self, ids_MK: Tensor) -> Tensor:
        """Return the log-probs of given tokens, and of all other tokens together, f32 [M, K+1].

        The first K columns are the log-probs of the tokens `ids_MK` (int64). The last column is the log-prob of all
        other tokens together.
        """
        ids_mK = self._select(ids_MK)
        return self._gather(vocab_parallel_logprobs(self.hidden_mE, self.vocab, ids_mK, with_rest=True))

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """Return (ids, log-probs) of the `k` most likely tokens.

        - ids: int64 [M, K]
        - log-probs: f32 [M, K+1]; the last column is the log-prob of all other tokens together
        """
        ids_mK, logprobs_mL = vocab_parallel_topk(self.hidden_mE, self.vocab, k)
        return self._gather(ids_mK), self._gather(logprobs_mL)

    def entropy(self) -> Tensor:
        """Return the entropy of the next token's distribution, f32 [M]."""
        return self._gather(vocab_parallel_entropy(self.hidden_mE, self.vocab))

    def moments(self, settings_M3: Tensor) -> Tensor:
        """Return the moments of each scored token's log-prob, f32 [M, X]; see `logprobs.vocab_parallel_moments`."""
        settings_m3 = self._select(settings_M3)
        return self._gather(vocab_parallel_moments(self.hidden_mE, self.vocab, self.targets_m, settings_m3))

    def divergence(self, teacher_hidden_MF: Tensor, teacher: TeacherHead, measure: ColumnSum) -> Tensor:
        """Return the divergence from a teacher at each scored token, f32 [M].

        The divergence is over the tokens that are in both vocabularies.

        `teacher_hidden_MF`: the teacher's final hidden states at the same positions.
        """
        common = self.within(teacher.vocab_size).vocab
        hidden_mF = self._select(teacher_hidden_MF)
        found = vocab_parallel_divergence(
            self.hidden_mE, common, hidden_mF, teacher.weight_VF, measure, teacher.logit_cap
        )
        return self._gather(found)

    def within(self, vocab_size: int | None) -> "OutputHead":
        """Return this head restricted to the first `vocab_size` tokens of the vocabulary.

        If `vocab_size` is None, the head is returned unchanged.
        """
        if vocab_size is None:
            return self
        return replace(self, vocab=replace(self.vocab, vocab_size=min(self.vocab.vocab_size, vocab_size)))

    def at_temperature(self, temperature: float) -> "OutputHead":
        """Return a copy of this head with another temperature."""
        return replace(self, vocab=replace(self.vocab, temperature=temperature))

    def at(self, rows_R: Tensor) -> "OutputHead":
        """Return this head restricted to some of the scored tokens.

        `rows_R`: indices of these tokens, int64 [R].
        """
        rows_r = rows_R if self.owners is None else self.owners.mine_among(rows_R)
        return replace(
            self,
            hidden_mE=self.hidden_mE.index_select(0, rows_r),
            targets_m=self.targets_m[rows_r],
            owners=self.owners and self.owners.at(rows_R),
        )

    def _select(self, values_M: Tensor) -> Tensor:
        return values_M if self.owners is None else values_M[self.owners.mine_M]

    def _gather(self, values_m: Tensor) -> Tensor:
        return values_m if self.owners is None else self.owners.whole(values_m)


def gradient_buffer(weight: Tensor) -> Tensor | None:
    """Return the f32 buffer in which Megatron accumulates the gradient of `weight`.

    Returns None if `weight` has no such buffer.
    """
    buffer = getattr(weight, "main_grad", None)
    return None if buffer is None or buffer.dtype != torch.float32 else buffer


def whole_head(weight_VE: Tensor, vocab_size: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the full output embedding, [W, E] without padding, on every rank of `group`. Collective."""
    pieces = [torch.empty_like(weight_VE) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, weight_VE.detach().contiguous(), group=group)
    return torch.cat(pieces)[:vocab_size]


def teacher_head(
    head_WF: Tensor, columns: int, group: dist.ProcessGroup, device: torch.device, logit_cap: float | None
) -> TeacherHead:
    """Return this rank's shard of a teacher's output embedding.

    Args:
        head_WF: the teacher's full output embedding.
        columns: number of vocabulary columns on each rank of `group`.
        group: the student's tensor-parallel group.
        logit_cap: bound of the teacher's logits, or None.
    """
    shard_VF = shard_of_head(head_WF, first=dist.get_rank(group) * columns, columns=columns)
    return TeacherHead(shard_VF.to(device), head_WF.size(0), logit_cap)
