"""Trainable engine with Megatron's optimizer and learning-rate schedule.

The engine makes one optimizer update per mini-batch. If a loss or gradient is not finite, all ranks skip the update.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from roll_opd.config.plan import OptimizerPlan, TrainPlan
from roll_opd.megatron import parallel
from roll_opd.megatron.engine import LossFunction, MegatronEngine
from roll_opd.megatron.fused_updates import fuse_adamw
from roll_opd.megatron.model_builder import DTYPES, unwrapped
from roll_opd.megatron.packing import PackedBatch
from roll_opd.megatron.router import (
    RouterLosses,
    disagreement,
    expert_layers,
    has_losses,
    reset_expert_counts,
    update_biases,
)
from roll_opd.models.device_phases import Part, Phase
from roll_opd.samples.sample import Sample


@dataclass(frozen=True)
class Update:
    """Result of one optimizer update on this rank."""

    assigned: list[list[int]]  # sample indices of each micro-batch
    reports: list[
        dict[str, Any]
    ]  # one report of the loss function per micro-batch; empty on ranks that do not return results
    grad_norm: float = float("nan")
    learning_rate: float = float("nan")
    applied: bool = False  # False: skipped because of a non-finite loss or gradient
    router_sums: dict[str, float] = field(default_factory=dict)  # sums of the routers over the replica

    @property
    def sums(self) -> dict[str, float]:
        """The `sums` of the loss reports, added over the micro-batches of this rank."""
        sums = [report["sums"] for report in self.reports]
        added = {name: float(sum(tensors[name].double() for tensors in sums)) for name in (sums[0] if sums else ())}
        return added | (self.router_sums if self.reports else {})

    def by_sample(self, name: str) -> dict[int, Any]:
        """Return the entries of the list `name` in the loss reports, as a dict {sample index: entry}."""
        return {
            number: values
            for numbers, report in zip(self.assigned, self.reports, strict=False)
            for number, values in zip(numbers, report[name], strict=True)
        }


class _Reduced:
    """Handle of a reduction that has ended. A second `wait` on gloo's own handle crashes the process."""

    def wait(self) -> None:
        pass


class MegatronLearner(MegatronEngine):
    """Model with an optimizer. Subclasses define the loss."""

    trainable = True
    plan: TrainPlan
    chunks: Sequence[DistributedDataParallel]

    def __init__(self, plan: TrainPlan, *, seed: int, deterministic: bool = True) -> None:
        super().__init__(plan, seed=seed, deterministic=deterministic)
        config = self.weights.config
        half = plan.model.dtype != "fp32"
        ddp_config = DistributedDataParallelConfig(
            use_distributed_optimizer=plan.optimizer.use_distributed_optimizer,
            grad_reduce_in_fp32=half,
            overlap_grad_reduce=plan.optimizer.overlap_grad_reduce,
            overlap_param_gather=plan.optimizer.overlap_param_gather,
        )
        self.chunks = [DistributedDataParallel(config, ddp_config, chunk) for chunk in self.chunks]
        self.optimizer = get_megatron_optimizer(_optimizer_config(plan), list(self.chunks))
        for each in optimizers_of(self.optimizer):
            fuse_adamw(each.optimizer)
        self.scheduler = _learning_rate_schedule(self.optimizer, plan.optimizer)
        if plan.optimizer.overlap_grad_reduce:
            self._overlap(config)
        self.router_losses: RouterLosses = config.router_losses  # type: ignore[attr-defined]
        config.routing_replay.replays = plan.router_replay == "R3"  # type: ignore[attr-defined]
        self._router_sums: dict[str, float] = {}
        config.grad_scale_func = self.optimizer.scale_loss
        self._losses: list[Tensor] = []  # losses of the micro-batches whose gradients are accumulated

    def discard_gradient(self) -> None:
        """Discard the accumulated gradient. Collective. The next gradient starts from zero."""
        self._wait_for_gradient()
        self._has_gradient = False

    def _add_gradient(
        self,
        samples: Sequence[Sample],
        loss: LossFunction,
        temperature: float,
        group_size: int = 1,
        assigned: list[list[int]] | None = None,
    ) -> Update:
        """Accumulate the gradient of a mini-batch's loss. Collective.

        If the call raises an error, the gradient of earlier calls is discarded too, because a part of this mini-batch's
        gradient may have been added to it.

        Args:
            loss: returns (part of the loss, report) for a micro-batch. The part is already divided by the global count.
                The report contains lists with one entry per sequence, and a dict of tensors, `sums`. The loss itself is
                `sums["weighted_loss"]`.
            group_size: number of consecutive samples that stay together in one micro-batch.
            assigned: micro-batches, as lists of indices of `samples`. If it is given, `samples` are only this rank's
                shard.
        """
        self.memory.check("update", *Part)
        if not self._has_gradient:
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            reset_expert_counts(self.chunks)
            self._losses.clear()
        elif self.plan.optimizer.overlap_grad_reduce:
            raise ValueError("with overlap_grad_reduce, call forward_backward only once per optimizer step")
        if assigned is None:
            assigned = self._assigned(samples, self.plan.train_limits, group_size)
        self._has_gradient = False
        reports = self._run(samples, assigned, temperature, loss, forward_only=False)
        self._has_gradient = True
        self._losses += [report["sums"]["weighted_loss"] for report in reports]
        return Update(assigned, reports if parallel.returns_results() else [], router_sums=self._router_sums)

    def _apply(self, added: Update, learning_rate: float | None = None) -> Update:
        """Make one optimizer update from the accumulated gradients. Collective.

        Returns a copy of `added` that contains the results of the optimizer update.
        """
        self.memory.check("update", *Part)
        finalize_model_grads(list(self.chunks))
        finite = self._all_finite()
        self.scheduler.step(1)
        for group in self.optimizer.param_groups if learning_rate is not None else ():
            group["lr"] = learning_rate
        grad_norm = float("nan")
        applied = False
        self._has_gradient = False
        if finite:
            applied, norm, _ = self.optimizer.step()
            grad_norm = float(norm) if norm is not None else float("nan")
        if applied:
            update_biases(self.chunks, self.weights.config.moe_router_bias_update_rate)
        rate = float(self.optimizer.param_groups[0]["lr"])
        return replace(added, grad_norm=grad_norm, learning_rate=rate, applied=bool(applied))

    def offload(self, parts: Iterable[Part], phase: Phase) -> None:
        """Do what `MegatronEngine.offload` does. An accumulated gradient is copied to the host."""
        self._wait_for_gradient(is_kept=True)
        super().offload(parts, phase)

    def _tensors(self) -> dict[Part, list[Tensor]]:
        """Return weights, gradients and optimizer state.

        The tensors include the padding of Megatron's buffers.
        """
        tensors = super()._tensors()
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        tensors[Part.WEIGHTS] += [buffer.param_data for buffer in buffers if buffer.param_data is not None]
        tensors[Part.GRADIENTS] = [buffer.grad_data for buffer in buffers]
        optimizers = [each.optimizer for each in optimizers_of(self.optimizer) if each.optimizer]
        masters = [weight for each in optimizers for group in each.param_groups for weight in group["params"]]
        moments = [value for each in optimizers for values in each.state.values() for value in values.values()]
        tensors[Part.OPTIMIZER] = [value for value in masters + moments if isinstance(value, Tensor)]
        return tensors

    def _overlap(self, config: Any) -> None:
        """Overlap gradient reduction and parameter gathering with computation."""
        self._needs_equal_micro_batches = (
            True  # collectives run in the last micro-batch before an update and in the first micro-batch after it
        )
        no_syncs = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = no_syncs if len(no_syncs) > 1 else no_syncs[0]
        model: Any = unwrapped(self.chunks[-1])
        model.fills_buffer = False
        if self.plan.optimizer.overlap_param_gather:
            groups = self.chunks[-1].param_to_bucket_group
            model.before_head = lambda weight: groups[weight].finish_param_sync() if weight in groups else None

    def _wait_for_gradient(self, *, is_kept: bool = False) -> None:
        """Wait for the gradient reductions that run in the background.

        If `is_kept` is false, the buffers are then free for another gradient, and the reduced gradient is lost.
        """
        for chunk in self.chunks if self.plan.optimizer.overlap_grad_reduce else ():
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.grad_reduce_handle is not None:
                    group.grad_reduce_handle.wait()
                    group.grad_reduce_handle = _Reduced() if is_kept else None

    def wait_for_weights(self) -> None:
        """Wait until parameters are gathered after an update. Collective."""
        for chunk in self.chunks if self.plan.optimizer.overlap_param_gather else ():
            chunk.start_param_sync(force_sync=True)

    def _before_run(self, packed: Sequence[PackedBatch]) -> None:
        """Count the tokens of all ranks. The routers' auxiliary losses are divided by this number."""
        if self.adapters:  # adapters are read by hooks, and Megatron's hooks do not wait for adapters
            self.wait_for_weights()
        if not has_losses(self.weights.config):
            return
        padding = [batch.sequences.padding_n for batch in packed]
        real = sum(
            (mask.numel() - mask.sum() for mask in padding if mask is not None), torch.zeros((), dtype=torch.long)
        )
        tokens = real.to(self.device, torch.float64)
        dist.all_reduce(tokens, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        self.router_losses.reset(float(tokens))

    def _after_run(self, packed: Sequence[PackedBatch]) -> None:
        """Sum the routers' losses and replay counts over the ranks of this model replica."""
        if not torch.is_grad_enabled():
            return
        config, packs = self.weights.config, [batch.sequences for batch in packed]
        self._router_sums = self.router_losses.replica_sums(config) if has_losses(config) else {}
        if packs[0].routes_n is not None:
            self._router_sums |= disagreement(packs, expert_layers(config))

    def _all_finite(self) -> bool:
        """Return whether all losses and gradients are finite on all ranks.

        The result is the same on all ranks, because otherwise only some of them would skip the update.
        """
        finite = [loss.isfinite() for loss in self._losses]
        self._losses.clear()
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                # test min and max: isfinite of all elements would allocate a few bytes per parameter
                finite += [extreme.isfinite() for extreme in buffer.grad_data.aminmax()]
        all_finite = torch.stack(finite).all().float()  # one synchronisation for all losses
        dist.all_reduce(all_finite, op=dist.ReduceOp.MIN)
        return bool(all_finite.item())


def optimizers_of(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain. A model with experts has a separate optimizer for them."""
    assert isinstance(optimizer, ChainedOptimizer)
    return optimizer.chained_optimizers


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


def _learning_rate_schedule(optimizer: MegatronOptimizer, plan: OptimizerPlan) -> OptimizerParamScheduler:
    """Return Megatron's learning-rate schedule.

    The schedule advances by one step before each update, so that the first learning rate is positive. A schedule that
    ends at 0 ends one step after the last update, so that the last learning rate is positive too, as in transformers.
    """
    end = plan.decay_steps or plan.total_steps + (plan.min_learning_rate == 0)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=plan.initial_learning_rate,
        max_lr=plan.learning_rate,
        min_lr=plan.min_learning_rate,
        lr_warmup_steps=plan.warmup_steps,
        lr_decay_steps=max(end, plan.warmup_steps + 1),
        lr_decay_style=plan.lr_scheduler_type,
        wsd_decay_steps=plan.wsd_decay_steps,
        lr_wsd_decay_style=plan.wsd_decay_style,
        start_wd=plan.weight_decay,
        end_wd=plan.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
