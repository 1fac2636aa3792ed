"""Routers of mixtures of experts, with globally averaged auxiliary losses, expert biases and routing replay.

`PackedRouter` replaces Megatron's router. Megatron's router needs Transformer Engine, includes padding in its losses,
and divides the losses by the number of tokens on each rank.

Routing replay (R3, arXiv 2510.11370) sends each token to the experts that the inference engine chose for it. Without
replay, the trainer's kernels can give slightly different scores. If two scores are close, the trainer's router may then
choose a different expert, which changes the token's log-prob. With replay, only the choice of experts comes from the
inference engine. The trained model computes the outputs and the weights of these experts.

Legend: n tokens of a micro-batch on this rank, L layers, K experts of a token, E experts.
"""

import copy
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
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from roll_opd.megatron.local_layers import pieces_of
from roll_opd.megatron.packing import PackedSequences
from roll_opd.megatron.parallel import tensor_rank
from roll_opd.samples.micro_batches import ROUTER_LOSSES

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


@dataclass
class RouterLosses:
    """Auxiliary losses of the routers on one rank in one update."""

    tokens: float = 1.0  # tokens of the mini-batch, without padding
    values: dict[str, Tensor] = field(default_factory=dict)  # sums over this rank's layers and micro-batches

    def reset(self, tokens: float) -> None:
        """Start an update. `tokens`: number of tokens in the mini-batch."""
        self.tokens, self.values = max(tokens, 1.0), {}

    def add(self, name: str, value: Tensor) -> None:
        """Add a layer's loss."""
        self.values[name] = self.values.get(name, torch.zeros_like(value)) + value

    def replica_sums(self, config: Any) -> dict[str, float]:
        """Return each loss, summed over the ranks of the model replica, without its coefficient. Collective."""
        names = [name for name, coefficient in zip(ROUTER_LOSSES, _coefficients(config), strict=True) if coefficient]
        zero = torch.zeros((), device=torch.cuda.current_device())
        sums = torch.stack([self.values.get(name, zero) for name in names])
        for group in (parallel_state.get_model_parallel_group(), parallel_state.get_context_parallel_group()):
            dist.all_reduce(sums, group=group)
        return dict(zip(names, sums.tolist(), strict=True))


class PackedRouter(TopKRouter):
    """Top-k router whose losses are means over all tokens of a mini-batch, independent of the layout.

    The z-loss is a mean over tokens. The balancing loss is computed for each micro-batch, over all tensor and context
    ranks, and weighted by the number of tokens of the micro-batch. It is E · Σ_e f_e · P_e (Fedus et al. 2022), where
    f_e is the fraction of choices that select expert e.
    """

    counts_E: Tensor | int = 0  # tokens per expert in this update, on this rank

    def __init__(self, config: TransformerConfig, *args: Any, **options: Any) -> None:
        if pieces_of(config).expert_bias:  # Megatron has a single setting for the biases of all linear layers
            config = copy.copy(config)
            config.add_bias_linear = True
        super().__init__(config, *args, **options)

    def set_layer_number(self, layer_number: int) -> None:
        """Set the layer number, counted from 1. The router replays the routes of this layer."""
        super().set_layer_number(layer_number)
        shared: Any = self.config
        best = 2 if self.enable_expert_bias else 1  # DeepSeek-V3 and DeepSeek-V2
        self.router_replay: Any = RouterReplayHook(shared.routing_replay, layer_number - 1, best)

    def gating(self, input: Tensor) -> Tensor:
        """Return logits [..., E]."""
        dtype = ROUTER_DTYPES.get(self.config.moe_router_dtype or "", input.dtype)
        bias_E = None if self.bias is None else self.bias.to(dtype)
        return F.linear(input.to(dtype), self.weight.to(dtype), bias_E)

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Return `logits` unchanged. In backward, the gradient of the z-loss is added to the gradient of the logits.

        The z-loss is the mean of (log Σ exp logits)².
        """
        coefficient = self.config.moe_z_loss_coeff
        if not (coefficient and self.training and torch.is_grad_enabled()):
            return logits
        squares_n = torch.logsumexp(logits.float(), -1).square()
        if padding_mask is not None:
            squares_n = squares_n.masked_fill(padding_mask, 0.0)
        return self._attach(logits, "z_loss", squares_n.sum(), coefficient)

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
        return self._attach(probs, "load_balancing_loss", value, coefficient)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count the tokens of the micro-batch per expert, without padding.

        This method replaces Megatron's method, which is compiled even on CPUs. If a layer is recomputed, its first
        forward pass is not counted, because it runs without gradients.
        """
        if not (self.config.moe_router_bias_update_rate and self.enable_expert_bias and torch.is_grad_enabled()):
            return
        real = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
        self.counts_E = self.counts_E + real.sum(0)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "PackedRouter":
        """Convert all tensors except the expert biases, which stay in fp32.

        In a lower precision, loaded biases would be rounded, and small updates would be lost.
        """
        exact = self.expert_bias
        super()._apply(fn, recurse)
        if exact is not None:
            self.expert_bias = exact.to(self.expert_bias.device)
        return self

    def _attach(self, output: Tensor, name: str, sum_over_tokens: Tensor, coefficient: float) -> Tensor:
        losses: RouterLosses = self.config.router_losses  # type: ignore[attr-defined]
        value = sum_over_tokens / losses.tokens
        losses.add(name, value.detach())
        return MoEAuxLossAutoScaler.apply(output, coefficient * value)


def reset_expert_counts(chunks: Iterable[torch.nn.Module]) -> None:
    """Reset the token counts of all experts."""
    for router in _with_biases(chunks):
        router.counts_E = 0


def update_biases(chunks: Iterable[torch.nn.Module], rate: float) -> None:
    """Raise or lower each expert's bias by `rate`. Collective over the ranks of a pipeline stage.

    The bias is raised if the expert had fewer tokens than average in the mini-batch, and lowered if it had more.

    Source: DeepSeek-V3 (arXiv 2412.19437, section 2.1.2; arXiv 2408.15664).
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
    """Return whether the routers of a model have auxiliary losses."""
    return bool(config.num_moe_experts and any(_coefficients(config)))


def expert_layers(config: Any) -> int:
    """Return the number of layers with experts in the whole model."""
    return sum(config.moe_layer_freq)


def _coefficients(config: Any) -> tuple[float, float]:
    """Return the coefficients of `ROUTER_LOSSES`."""
    balances = config.moe_router_load_balancing_type == "aux_loss"
    return config.moe_z_loss_coeff or 0.0, config.moe_aux_loss_coeff if balances else 0.0


Choice = tuple[Tensor, Tensor]  # scores [n, K] and experts int64 [n, K]


@dataclass
class RouterReplayState:
    """State that all routers of a rank share: the current micro-batch, which contains the routes."""

    replays: bool = False  # False: the routes are not used, only compared with the routers' choices
    _pack: PackedSequences | None = None
    # layer -> micro-batches, in forward order, for which the backward pass still has to recompute the layer
    _to_recompute: dict[int, deque[PackedSequences | None]] = field(default_factory=lambda: defaultdict(deque))

    def begin_run(self) -> None:
        """Reset the state. Called before each run of forward passes or of training."""
        self._pack = None
        self._to_recompute.clear()

    def set_pack(self, pack: PackedSequences) -> None:
        """Set the current micro-batch."""
        self._pack = pack

    def choose(self, layer: int, own: Choice, scores: Tensor) -> Choice:
        """Return (scores, experts) of each token in a layer.

        With replay, the experts are the replayed experts, and their scores are taken from `scores`. Without replay, or
        for tokens without routes, the result is the router's own choice.

        Args:
            layer: layer number, counted from 0.
            own: the router's own choice.
            scores: scores of all experts, [n, E].
        """
        pack, is_recomputed = self._pack_of(layer)
        if pack is None or pack.routes_n is None:
            return own
        given = pack.routes_n[:, layer]
        ranks = len(given) // len(scores)  # sequence parallelism
        start = len(scores) * tensor_rank()[0] if ranks > 1 else 0
        given = given[start : start + len(scores)].long()
        own_ids = own[1]
        known = given[:, :1] >= 0
        if not is_recomputed and pack.differs_n is not None:
            differs = (own_ids.sort(1).values != given.sort(1).values).any(1) & known[:, 0]
            pack.differs_n[start : start + len(scores), layer] = differs
        if not self.replays:
            return own
        ids = torch.where(known, given, own_ids)
        return scores.gather(1, ids), ids

    def _pack_of(self, layer: int) -> tuple[PackedSequences | None, bool]:
        if not is_checkpointing():
            return self._pack, False
        if torch.is_grad_enabled():
            return self._to_recompute[layer].popleft(), True
        self._to_recompute[layer].append(self._pack)
        return self._pack, False


@dataclass
class RouterReplayHook:
    """Object for the attribute `router_replay` of one of Megatron's routers."""

    replay: RouterReplayState
    layer: int  # layer number, from 0
    best_of_group: int = 1  # groups of experts are ranked by the sum of this many scores

    def get_replay_topk(
        self, scores: Tensor, topk: int, num_groups: int | None, group_topk: int | None, own: Callable[..., Choice]
    ) -> Choice:
        """Return (scores, experts) of each token.

        `own`: the router's top-k function.
        """
        allowed = in_best_groups(scores, num_groups, group_topk, self.best_of_group) if group_topk else scores
        return self.replay.choose(self.layer, own(allowed, topk, None, None), scores)


def in_best_groups(scores_nE: Tensor, groups: int | None, chosen: int, best: int) -> Tensor:
    """Return scores [n, E] that are -inf for all experts outside of a token's best groups.

    The experts form `groups` groups of equal size. The `chosen` best groups keep their scores. Groups are ranked by the
    sum of their `best` highest scores: 1 score in DeepSeek-V2, 2 scores in DeepSeek-V3. Megatron instead sums the
    highest K / `chosen` scores of each group.
    """
    assert groups
    grouped = scores_nE.unflatten(1, (groups, -1))
    kept = grouped.topk(best, -1).values.sum(-1).topk(chosen, -1).indices
    is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=scores_nE.device).scatter(1, kept, True)
    return grouped.masked_fill(~is_kept[..., None], -torch.inf).flatten(1)


def disagreement(packs: Iterable[PackedSequences], expert_layers: int) -> dict[str, float]:
    """Count the tokens for which a router's choice differs from the routes.

    The counts cover the packs of this data-parallel rank. Collective over the ranks of a model replica.

    - `routed_tokens`: tokens with routes
    - `rerouted_tokens`: tokens for which the choice differs in at least one layer
    - `routed_choices` and `rerouted_choices`: the same numbers, but each expert layer of a token is counted separately
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
