"""The student's training engine: policy-gradient updates with Megatron's optimizers.

Legend: M scored tokens of a pack.
"""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from roll_opd.algorithms.aggregation import token_weights
from roll_opd.algorithms.kl import KL_ESTIMATORS
from roll_opd.algorithms.losses.batch import LossBatch, probability_ratio
from roll_opd.algorithms.losses.table import PolicyLoss
from roll_opd.algorithms.opd import opd_penalty
from roll_opd.algorithms.returns import discounted_to_go
from roll_opd.algorithms.table import policy_loss
from roll_opd.config.plan import ObjectivePlan, OptimizerPlan, TrainPlan
from roll_opd.data.training import TrainResult, TrainSample
from roll_opd.megatron import parallel
from roll_opd.megatron.batches import PackedBatch, Sample
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.model import DTYPES


class MegatronTrainer(MegatronEngine):
    """A model that learns."""

    trainable = True
    plan: TrainPlan

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = False) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        config = self.bridge.config
        half = plan.model.dtype != "fp32"
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=plan.optimizer.use_distributed_optimizer,
            grad_reduce_in_fp32=half,
            overlap_grad_reduce=False,
        )
        self.chunks = [DistributedDataParallel(config, ddp_config, chunk) for chunk in self.chunks]
        self.optimizer = get_megatron_optimizer(_optimizer_config(plan), self.chunks)
        self.scheduler = _scheduler(self.optimizer, plan.optimizer)
        config.grad_scale_func = self.optimizer.scale_loss
        # The token count that the schedule passes along is not needed: losses are divided already.
        config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(chunks)

    def update(self, samples: Sequence[TrainSample], objective: ObjectivePlan, temperature: float) -> TrainResult:
        """Make one optimizer update from the whole mini-batch `samples`.

        `sums` holds, over this rank's action tokens: `tokens`, `weighted_loss` (Σ over all ranks is the loss),
        `policy_loss` (its part without the KL loss), `kl_loss` (KL to the reference policy, weighted as the loss
        is, before its coefficient), `ratio`, `clipped` (ratios outside the clip range) and `approx_kl` (k3 of old
        against new).
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batch = _columns(samples, objective)
        mine = self._assigned(batch, self.plan.train_limits, together=2 if objective.paired else 1)
        arguments = objective.policy_loss_arguments
        function = partial(policy_loss(objective.policy_loss, arguments), **arguments)
        loss = partial(_loss, objective=objective, function=function)
        micro_batches = [[batch[n] for n in numbers] for numbers in mine]
        reports = self._run(micro_batches, temperature, loss, forward_only=False)
        if not micro_batches:  # no sample here, but the other ranks wait for this one's (zero) gradient
            finalize_model_grads(self.chunks)

        finite = self._everywhere_finite(reports)
        self.scheduler.step(1)
        grad_norm = float("nan")
        applied = False
        if finite:
            applied, norm, _ = self.optimizer.step()
            grad_norm = float(norm) if norm is not None else float("nan")
        speaks = parallel.reports_logprobs()
        logprobs = {
            number: values
            for numbers, report in zip(mine, reports, strict=False)
            for number, values in zip(numbers, report["logprobs"], strict=True)
            if speaks
        }
        return TrainResult(
            sums=_summed([report["sums"] for report in reports]) if speaks else {},
            logprobs=logprobs,
            grad_norm=grad_norm,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            applied=bool(applied),
        )

    def _everywhere_finite(self, reports: Sequence[dict]) -> bool:
        """Whether every loss and every local gradient is finite, on every rank: all must skip, or none."""
        finite = all(bool(torch.isfinite(report["sums"]["weighted_loss"])) for report in reports)
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                finite = finite and bool(torch.isfinite(buffer.grad_data).all())
        verdict = torch.tensor(float(finite), device=self.device)
        dist.all_reduce(verdict, op=dist.ReduceOp.MIN)
        return bool(verdict.item())


def _columns(samples: Sequence[TrainSample], objective: ObjectivePlan) -> list[Sample]:
    """Attach to each sample the arrays that the loss reads, each token's share of the global mean among them."""
    masks = [torch.from_numpy(sample.action_mask) for sample in samples]
    weights = token_weights(masks, objective.loss_agg_mode, objective.loss_normaliser)
    result = []
    for sample, weight in zip(samples, weights, strict=True):
        columns = {
            "mask": sample.action_mask,
            "weight": weight.numpy(),
            "advantages": sample.advantages,
            "opd_coefficients": sample.opd_coefficients,
            "opd_teacher": sample.opd_teacher,
        }
        if sample.old_logprobs is not None:
            columns["old_logprobs"] = sample.old_logprobs
        if sample.ref_logprobs is not None:
            columns["ref_logprobs"] = sample.ref_logprobs
        if sample.reward is not None:
            columns["rewards"] = np.full(len(sample.action_mask), sample.reward, np.float32)
        result.append(Sample(sample.tokens, sample.prompt_length, columns))
    return result


def _loss(
    logprobs_M: Tensor, batch: PackedBatch, *, objective: ObjectivePlan, function: PolicyLoss
) -> tuple[Tensor, dict]:
    columns = batch.columns
    old_M = columns.get("old_logprobs", logprobs_M.detach())
    penalty_M = opd_penalty(old_M, columns["opd_coefficients"], columns["opd_teacher"])
    advantages_M = columns["advantages"] - discounted_to_go(penalty_M, batch.lengths, objective.opd_kl_discount)
    mask_M, ref_M = columns["mask"], columns.get("ref_logprobs")
    read = LossBatch(
        logprobs_M, old_M, advantages_M, mask_M, batch.lengths, rewards_M=columns.get("rewards"), ref_logprobs_M=ref_M
    )
    policy = (function(read) * columns["weight"]).sum()
    kl = _kl_loss(read, objective.kl_loss, columns["weight"])
    loss = policy + objective.kl_loss_coef * kl

    ratio_M = probability_ratio(logprobs_M.detach(), old_M)[mask_M]
    clip = {"clip_low": objective.pg_clip_low, "clip_high": objective.pg_clip_high} | objective.policy_loss_arguments
    outside_M = (ratio_M < 1 - clip["clip_low"]) | (ratio_M > 1 + clip["clip_high"])
    sums = {
        "tokens": mask_M.sum(),
        "weighted_loss": loss.detach(),
        "policy_loss": policy.detach(),
        "ratio": ratio_M.sum(),
        "clipped": outside_M.sum(),
        "approx_kl": (1 / ratio_M - 1 + ratio_M.log()).sum(),
        "kl_loss": kl.detach(),
    }
    pieces = logprobs_M.detach().float().cpu().split(list(batch.lengths))
    return loss, {"sums": sums, "logprobs": [piece.numpy() for piece in pieces]}


def _kl_loss(batch: LossBatch, name: str, weight_M: Tensor) -> Tensor:
    """To the reference policy; without one the student is its own: 0, with gradient 0."""
    logprobs_M = batch.action_logprobs_M
    reference_M = logprobs_M.detach() if batch.ref_logprobs_M is None else batch.ref_logprobs_M
    others = [torch.where(batch.mask_M, other_M, 0) for other_M in (reference_M, batch.old_logprobs_M)]
    estimator = KL_ESTIMATORS[name]
    kl_M = estimator(logprobs_M, *others) if name == "corrected_k3" else estimator(logprobs_M, others[0])
    return (kl_M * weight_M).sum()


def _summed(reports: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    names = reports[0] if reports else {}
    return {name: float(sum(report[name].double() for report in reports)) for name in names}


def _optimizer_config(plan: TrainPlan) -> OptimizerConfig:
    optimizer, dtype = plan.optimizer, DTYPES[plan.model.dtype]
    return OptimizerConfig(
        optimizer="adam",
        lr=optimizer.learning_rate,
        min_lr=optimizer.min_learning_rate,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.adam_beta1,
        adam_beta2=optimizer.adam_beta2,
        adam_eps=optimizer.adam_epsilon,
        clip_grad=optimizer.max_grad_norm,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
    )


def _scheduler(optimizer: object, plan: OptimizerPlan) -> OptimizerParamScheduler:
    """Megatron's schedule. It is stepped before each update, so that the first one has a learning rate above 0."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=plan.learning_rate,
        min_lr=plan.min_learning_rate,
        lr_warmup_steps=plan.warmup_steps,
        lr_decay_steps=max(plan.total_steps, plan.warmup_steps + 1),
        lr_decay_style=plan.lr_scheduler_type,
        start_wd=plan.weight_decay,
        end_wd=plan.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # a resumed run follows its own plan; only the count of steps is restored
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
