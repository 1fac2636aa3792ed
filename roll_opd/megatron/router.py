"""The router of a mixture of experts: its own losses, under one global denominator.

Megatron's router leaves out what it needs without Transformer Engine, counts padding, and weighs its losses by a number
of tokens that ranks need not have in common.

Legend: n tokens of a micro-batch on this rank, E experts.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from roll_opd.megatron.replay import Replayed
from roll_opd.samples.training import ROUTER_LOSSES

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass
class RouterLosses:
    """What the routers of a rank know of an update, and leave behind."""

    tokens: float = 1.0  # of the whole mini-batch, padding left out
    values: dict[str, Tensor] = field(default_factory=dict)  # this rank's part, summed over layers and micro-batches

    def begin(self, tokens: float) -> None:
        """Forget the last update."""
        self.tokens, self.values = max(tokens, 1.0), {}

    def add(self, name: str, value: Tensor) -> None:
        self.values[name] = self.values.get(name, torch.zeros_like(value)) + value

    def of_replica(self, config: Any) -> dict[str, float]:
        """Return each loss, before its coefficient, as a sum over a model replica. Collective over its ranks."""
        names = [name for name, is_there in zip(ROUTER_LOSSES, _coefficients(config), strict=True) if is_there]
        nothing = torch.zeros((), device=torch.cuda.current_device())
        sums = torch.stack([self.values.get(name, nothing) for name in names])
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(sums, group=group)
        return dict(zip(names, sums.tolist(), strict=True))


class PackedRouter(TopKRouter):
    """A top-k router whose losses are means over all tokens of a mini-batch, however it is split.

    The z-loss is a mean of tokens. The balancing loss is that of each micro-batch, all its tensor and context ranks
    together (E · Σ_e f_e · P_e, Fedus et al. 2022, over the number of choices), weighed by its share of the tokens.
    """

    counts_E: Tensor | int = 0  # tokens of each expert in this update, on this rank

    def set_layer_number(self, layer_number: int) -> None:
        """Take the layer's number, from 1, by which the router finds its part of routes that are replayed."""
        super().set_layer_number(layer_number)
        shared: Any = self.config
        best = 2 if self.enable_expert_bias else 1  # as DeepSeek-V3 and DeepSeek-V2 choose groups
        self.router_replay: Any = Replayed(shared.routing_replay, layer_number - 1, best)

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [..., E]."""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype))

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Have the mean of (log Σ exp logits)² take part in the gradient."""
        coefficient = self.config.moe_z_loss_coeff
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return logits
        squares_n = torch.logsumexp(logits.float(), -1).square()
        if padding_mask is not None:
            squares_n = squares_n.masked_fill(padding_mask, 0.0)
        return self._with(logits, "z_loss", squares_n.sum(), coefficient)

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if not coefficient:
            return probs
        counts_E = routing_map.sum(0).float()
        dist.all_reduce(counts_E, group=self.tp_cp_group)
        # Σ_e f_e · Σ_n P_e: the loss times the tokens of the micro-batch
        shares_E = counts_E / counts_E.sum().clamp(min=1)
        value = len(shares_E) * (shares_E * scores_for_aux_loss.sum(0)).sum()
        return self._with(probs, "load_balancing_loss", value, coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's tokens once an update, without padding; Megatron compiles its own version, on CPUs too.

        A pass whose layers are computed again on the way back has no gradient on the way out.
        """
        if not (self.config.moe_router_bias_update_rate and self.enable_expert_bias and torch.is_grad_enabled()):
            return
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        self.counts_E = self.counts_E + real.sum(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedRouter":
        """Leave the biases in fp32: in another precision updates would be lost, and so would the last bits loaded."""
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self

    def _with(self, output: Tensor, name: str, sum_over_tokens: Tensor, coefficient: float) -> Tensor:
        losses: RouterLosses = self.config.router_losses  # type: ignore[attr-defined]
        value = sum_over_tokens / losses.tokens
        losses.add(name, value.detach())
        attached: Any = MoEAuxLossAutoScaler.apply(output, coefficient * value)
        return attached


def begin_counts(chunks: Iterable[torch.nn.Module]) -> None:
    """Forget how many tokens each expert had."""
    for router in _with_biases(chunks):
        router.counts_E = 0


def update_biases(chunks: Iterable[torch.nn.Module], rate: float) -> None:
    """Move each expert's bias up by `rate` where it had fewer tokens than the mean of a mini-batch, down where more.

    DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; arXiv 2408.15664). Collective over the ranks of a pipeline stage.
    """
    routers = _with_biases(chunks) if rate else []
    if not routers:
        return
    biases: list[Any] = [router.expert_bias for router in routers]
    counts = [
        torch.zeros_like(bias_E, dtype=torch.float64) + router.counts_E
        for bias_E, router in zip(biases, routers, strict=True)
    ]
    counts_LE = torch.stack(counts)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    dist.all_reduce(counts_LE, group=group)
    steps_LE = (counts_LE.mean(1, keepdim=True) - counts_LE).sign().float() * rate
    for bias_E, step_E in zip(biases, steps_LE, strict=True):
        bias_E += step_E


def _with_biases(chunks: Iterable[torch.nn.Module]) -> list[PackedRouter]:
    modules = (module for chunk in chunks for module in chunk.modules())
    return [module for module in modules if isinstance(module, PackedRouter) and module.enable_expert_bias]


def has_losses(config: Any) -> bool:
    """Whether the routers of a model have losses of their own."""
    return bool(config.num_moe_experts and any(_coefficients(config)))


def expert_layers(config: Any) -> int:
    """Return how many layers of the whole model have experts."""
    return sum(config.moe_layer_freq)


def _coefficients(config: Any) -> tuple[float, float]:
    """Return those of `ROUTER_LOSSES`."""
    balances = config.moe_router_load_balancing_type == "aux_loss"
    return config.moe_z_loss_coeff or 0.0, config.moe_aux_loss_coeff if balances else 0.0
