"""Routing replay: tokens go to the experts to which the inference engine sent them (R3, arXiv 2510.11370).

A router that reads the same states with other kernels may choose another expert where two are close, and the token's
log-prob is then another one. What experts make of the states, and how much each counts, stays the model's own.

Legend: n tokens of a micro-batch on this rank, L layers of the model, K experts of a token, E experts.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor

from roll_opd.megatron.batches import PackedSequences
from roll_opd.megatron.weights.stream import tensor_rank

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
