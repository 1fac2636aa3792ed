"""Training engine of the student: policy losses, and distillation losses over a top-k or the whole vocabulary.

Legend: M scored tokens of a pack, R scored tokens with targets of a teacher, K tokens of a top-k, L = K + 1, F hidden
size of a teacher.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from torch import Tensor

from roll_opd.config.plan import ObjectivePlan, TrainPlan
from roll_opd.megatron.engine import LossFunction
from roll_opd.megatron.learner_engine import MegatronLearner, Update
from roll_opd.megatron.model_builder import HeadModel, unwrapped
from roll_opd.megatron.output_head import OutputHead, TeacherHead, teacher_head
from roll_opd.megatron.packing import PackedBatch
from roll_opd.models.device_phases import Part
from roll_opd.objective.divergences import ColumnSum, divergence, topk_divergence
from roll_opd.objective.engine_evidence import SAMPLED_BY, engine_sums, tested_settings
from roll_opd.objective.opd_loss import opd_loss
from roll_opd.objective.registry import POLICY_LOSSES, policy_loss
from roll_opd.objective.reverse_kl import sampled_mask
from roll_opd.samples.micro_batches import TrainResult
from roll_opd.samples.sample import Sample
from roll_opd.samples.transport import as_tensor


class MegatronTrainer(MegatronLearner):
    """Policy training engine: forward, loss, backward, optimizer step."""

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        self.teacher_heads: dict[str, TeacherHead] = {}

    def update(
        self,
        samples: Sequence[Sample],
        objective: ObjectivePlan,
        temperature: float,
        step: int = 1,
        *,
        assigned: list[list[int]] | None = None,
    ) -> TrainResult:
        """Make one optimizer update from a mini-batch.

        Args:
            samples: have the columns that `objective.columns.loss_columns` returns.
            step: the step of the run, counted from 1.
            assigned: if it is given, `samples` are only this data-parallel rank's shard (see `samples.micro_batches`).

        The `sums` of the result are sums over this rank's action tokens. Losses are weighted by the token weights.

        - `tokens`: number of tokens
        - `weighted_loss`: this rank's part of the loss; the loss is the sum of the parts over all ranks
        - `policy_loss`: without the KL loss
        - `kl_loss`: KL to the reference policy, without its coefficient
        - `ratio`: sum of the probability ratios
        - `clipped`: number of ratios outside of the loss's bounds
        - `approx_kl`: sum of r - 1 - log r, where r is the ratio
        - `opd_loss` (with a distillation term): divergence from the teachers, with their coefficients
        - `entropy` (with an entropy term): without its coefficient
        - `engine_*` (with the columns of `objective.engine_evidence`): sums over the tested tokens
        - `demonstration_tokens` (with demonstrations): number of their tokens
        - `demonstration_loss` (with demonstrations): weighted sum of -logprobs over their tokens, for every policy loss

        Tokens of demonstrations are included only in `weighted_loss`, `policy_loss` and the last two sums.
        """
        self.discard_gradient()
        loss = self._loss(objective, step)
        added = self._add_gradient(samples, loss, temperature, 2 if objective.paired else 1, assigned)
        return _result(self._apply(added))

    def forward_backward(
        self,
        samples: Sequence[Sample],
        objective: ObjectivePlan,
        temperature: float,
        step: int = 1,
        *,
        assigned: list[list[int]] | None = None,
    ) -> TrainResult:
        """Accumulate the gradient of a mini-batch's loss. See `update` for the arguments."""
        loss = self._loss(objective, step)
        return _result(self._add_gradient(samples, loss, temperature, 2 if objective.paired else 1, assigned))

    def optim_step(self, learning_rate: float | None = None) -> TrainResult:
        """Make one optimizer update from the accumulated gradients.

        If `learning_rate` is None, the scheduled learning rate is used.
        """
        return _result(self._apply(Update([], []), learning_rate))

    def _loss(self, objective: ObjectivePlan, step: int) -> LossFunction:
        """Return the loss function of micro-batches in step `step`.

        Raises an error if the arguments of the policy loss are invalid.
        """
        policy_loss(objective.policy_loss, objective.policy_loss_args)
        arguments = {**POLICY_LOSSES.defaults(objective.policy_loss), **objective.policy_loss_args}

        def loss(head: OutputHead, batch: PackedBatch) -> tuple[Tensor, dict]:
            logprobs_M = head.logprobs()
            value, sums, tokens = opd_loss(
                logprobs_M, batch.columns, batch.lengths, objective=objective, arguments=arguments, step=step
            )
            if objective.entropy_loss_coef:
                entropy = torch.where(sampled_mask(batch.columns), head.entropy() * batch.columns["weight"], 0).sum()
                value = value - objective.entropy_loss_coef * entropy
                sums["entropy"] = entropy.detach()
            if objective.opd_objective != "sampled":
                distillation = distillation_loss(head, batch, objective, self.teacher_heads)
                value = value + distillation
                sums["opd_loss"] = distillation.detach()
            sums["weighted_loss"] = value.detach()
            if SAMPLED_BY in batch.columns and objective.engine_check:
                rows_R = batch.columns[SAMPLED_BY].nonzero()[:, 0]
                settings_M3 = tested_settings(batch.columns, objective.engine_check, logprobs_M)
                sums |= engine_sums(batch.columns, head.at(rows_R).moments(settings_M3[rows_R]), rows_R)
            return value, {"sums": sums, "columns": _by_sequence({"old_logprobs": logprobs_M, **tokens}, batch.lengths)}

        return loss

    def _tensors(self) -> dict[Part, list[Tensor]]:
        tensors = super()._tensors()
        tensors[Part.WEIGHTS] += [head.weight_VF for head in self.teacher_heads.values()]
        return tensors

    def load_teacher_head(self, name: str, head: np.ndarray, logit_cap: float | None = None) -> None:
        """Store this rank's rows of a teacher's output embedding, for the objective `full`.

        Pipeline stages before the last store nothing. `head`: the full output embedding, [W, F].
        """
        self.memory.check("load a teacher's output embedding", Part.WEIGHTS)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        group = parallel_state.get_tensor_model_parallel_group()
        model = unwrapped(self.chunks[-1])
        assert isinstance(model, HeadModel)
        columns = model.output_weight().size(0)
        self.teacher_heads[name] = teacher_head(as_tensor(head), columns, group, self.device, logit_cap)


def _result(done: Update) -> TrainResult:
    return TrainResult(done.sums, done.by_sample("columns"), done.grad_norm, done.learning_rate, done.applied)


def _by_sequence(columns: Mapping[str, Tensor], lengths: Sequence[int]) -> list[dict[str, np.ndarray]]:
    pieces = {name: values_M.detach().float().cpu().split(list(lengths)) for name, values_M in columns.items()}
    return [{name: each[number].numpy() for name, each in pieces.items()} for number in range(len(lengths))]


def distillation_loss(
    head: OutputHead, batch: PackedBatch, objective: ObjectivePlan, heads: Mapping[str, TeacherHead]
) -> Tensor:
    """Return Σ weight · coefficient · divergence over this rank's tokens and over the teachers. Collective.

    `heads`: output heads of the teachers. Only the objective `full` needs them.
    """
    measure = divergence(objective.opd_divergence, beta=objective.opd_jsd_beta, alpha=objective.opd_skew_alpha)
    total, head = torch.zeros((), device=head.device), head.within(objective.opd_vocab_size)
    for name in (column.removesuffix("/share") for column in batch.columns if column.endswith("/share")):
        share_M = batch.columns[f"{name}/share"] * batch.columns["weight"]
        rows_R = share_M.nonzero()[:, 0]
        targets = {key: batch.columns[f"{name}/{key}"][rows_R] for key in _TARGET_ARRAYS[objective.opd_objective]}
        divergence_R = _DIVERGENCE_OVER[objective.opd_objective](head.at(rows_R), measure, heads.get(name), **targets)
        total = total + (share_M[rows_R] * divergence_R).sum()
    return total


def _over_topk(
    head: OutputHead,
    measure: ColumnSum,
    teacher: TeacherHead | None,
    topk_ids: Tensor,
    topk_logprobs: Tensor,
    topk_rest: Tensor,
) -> Tensor:
    teacher_RL = torch.cat([topk_logprobs, topk_rest[:, None]], dim=1)
    return topk_divergence(head.logprobs_with_rest(topk_ids.long()), teacher_RL, measure)


def _over_vocabulary(head: OutputHead, measure: ColumnSum, teacher: TeacherHead, hidden: Tensor) -> Tensor:
    return head.divergence(hidden, teacher, measure)


_TARGET_ARRAYS = {"topk": ("topk_ids", "topk_logprobs", "topk_rest"), "full": ("hidden",)}  # see `samples.sample`
_DIVERGENCE_OVER: dict[str, Callable[..., Tensor]] = {"topk": _over_topk, "full": _over_vocabulary}
