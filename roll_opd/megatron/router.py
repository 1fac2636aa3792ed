"""The router of a mixture of experts: its own losses, under one global denominator.

Megatron's router leaves out what it needs without Transformer Engine, counts padding, and weighs its losses by a number
of tokens that ranks need not have in common.

Legend: n tokens of a micro-batch on this rank, E experts.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import is_checkpointing
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from roll_opd.megatron.batches import PackedSequences
from roll_opd.megatron.weights.stream import tensor_rank
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


Choice = tuple[Tensor, Tensor]  # scores [n, K] and experts int64 [n, K]


@dataclass
class RoutingReplay:
    """What the routers of a rank share: the micro-batch that they read, and the routes it brought."""

    replays: bool = False  # False: the routers' own choices stand, and are only compared
    _pack: PackedSequences | None = None
    # what is recomputed on the way back, layer by layer, in the order of the way out
    _to_recompute: dict[int, deque[PackedSequences | None]] = field(default_factory=lambda: defaultdict(deque))

    def begin_run(self) -> None:
        """Forget the micro-batches before."""
        self._pack = None
        self._to_recompute.clear()

    def begin(self, pack: PackedSequences) -> None:
        """Have the routers read `pack`."""
        self._pack = pack

    def choose(self, layer: int, own: Choice, scores: Tensor) -> Choice:
        """Return what the router of `layer` (from 0) chooses of `scores` [n, E], which is `own` without replay."""
        pack, is_again = self._read_by(layer)
        if pack is None or pack.routes_n is None:
            return own
        given = pack.routes_n[:, layer]
        ranks = len(given) // len(scores)  # sequence parallelism
        start = len(scores) * tensor_rank()[0] if ranks > 1 else 0
        given = given[start : start + len(scores)].long()
        own_ids = own[1]
        known = given[:, :1] >= 0
        if not is_again and pack.differs_n is not None:
            differs = (own_ids.sort(1).values != given.sort(1).values).any(1) & known[:, 0]
            pack.differs_n[start : start + len(scores), layer] = differs
        if not self.replays:
            return own
        ids = torch.where(known, given, own_ids)
        return scores.gather(1, ids), ids

    def _read_by(self, layer: int) -> tuple[PackedSequences | None, bool]:
        if not is_checkpointing():
            return self._pack, False
        if torch.is_grad_enabled():
            return self._to_recompute[layer].popleft(), True
        self._to_recompute[layer].append(self._pack)
        return self._pack, False


@dataclass
class Replayed:
    """Megatron's `router_replay` of one router."""

    replay: RoutingReplay
    layer: int  # from 0
    best_of_group: int = 1  # scores that a group of experts is judged by, summed

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, own: Callable[..., Choice]
    ) -> Choice:
        """Return scores and experts of each token."""
        allowed = in_best_groups(scores, num_groups, group_topk, self.best_of_group) if group_topk else scores
        return self.replay.choose(self.layer, own(allowed, topk, None, None), scores)


def in_best_groups(scores_nE: Tensor, groups: int | None, chosen: int, best: int) -> Tensor:
    """Return scores [n, E] that are -inf outside of each token's `chosen` best of so many equal groups of experts.

    A group is as good as the sum of its `best` highest scores: one in DeepSeek-V2, two in DeepSeek-V3. Megatron's own
    sum is over as many as are chosen of a group.
    """
    assert groups
    of_groups = scores_nE.unflatten(1, (groups, -1))
    kept = of_groups.topk(best, -1).values.sum(-1).topk(chosen, -1).indices
    is_kept = torch.zeros(of_groups.shape[:2], dtype=torch.bool, device=scores_nE.device).scatter(1, kept, True)
    return of_groups.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)


def disagreement(packs: Iterable[PackedSequences], expert_layers: int) -> dict[str, float]:
    """Count, over this data-parallel rank's `packs`, where routers would have chosen otherwise than the routes.

    Returns `routed_tokens` and how many of them differ in some layer (`rerouted_tokens`), and the same of their
    choices, one a token and layer of experts. Collective over the ranks of a model replica.
    """
    pairs = [(pack.routes_n, pack.differs_n) for pack in packs]
    known = [routes_n[:, :, 0].amax(1) >= 0 for routes_n, _ in pairs if routes_n is not None]
    found = [differs_n for _, differs_n in pairs if differs_n is not None]
    differs = torch.cat(found).to(torch.uint8)
    dist.all_reduce(differs, op=dist.ReduceOp.MAX, group=parallel_state.get_model_parallel_group())
    tokens = torch.cat(known).sum()
    sums = torch.stack([tokens, differs.amax(1).sum(), tokens * expert_layers, differs.sum()]).double()
    dist.all_reduce(sums, group=parallel_state.get_context_parallel_group())
    names = ("routed_tokens", "rerouted_tokens", "routed_choices", "rerouted_choices")
    return dict(zip(names, sums.tolist(), strict=True))
