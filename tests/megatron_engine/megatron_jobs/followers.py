"""Models whose weights follow a student's."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import pytest
import torch
import torch.distributed as dist
from megatron_ranks import Job, identical, meet_anew, weights, write_arrays
from megatron_registry import jobs, operation
from safetensors.torch import load_file
from torch import Tensor

from roll_opd.config.plan import FollowingPlan, MicroBatchLimits, ModelPlan
from roll_opd.megatron import parallel
from roll_opd.megatron.ema_teacher_engine import MegatronFollower
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import hf_tensors, sync_plan, weight_buckets
from roll_opd.megatron.weights.sync_plan import Receivers, SyncPlan, unstacked
from roll_opd.samples.weight_bucket import BucketMemory, map_bucket

FOLLOW_LAYOUTS = ("tp1", "tp2sp", "pp2", "dp2", "tp2pp2")
FOLLOWED = {"qwen3_tied": "fp32", "qwen3": "bf16"}  # model -> what it computes in
DECAYS = (0.0, 0.75)
FOLLOWED_TIMES = 3  # of which the last one is done again after a resume


def learned(start: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """Return the weights of a student after some updates from the weights `start`."""
    generator = torch.Generator().manual_seed(times)
    return {name: start[name] + 0.01 * torch.randn(start[name].shape, generator=generator) for name in sorted(start)}


def in_parts(follower: MegatronFollower, weights: Mapping[str, torch.Tensor], parts: int = 3) -> None:
    """Let the follower follow weights in several parts; the tensors of one parameter are in different parts."""
    names = list(weights)
    for part in range(parts):
        sent = {name: weights[name].clone() for name in names[part::parts]}
        follower.follow(sent, last=part == parts - 1)
        for tensor in sent.values():  # of memory that the next part is written to
            tensor.fill_(torch.nan)


def check_plan(plan: SyncPlan, whole: Mapping[str, Tensor]) -> None:
    """Check the plan, and the tensors that the ranks of each stage get, against all full tensors `whole`."""
    assert [(t.name, t.dtype, t.shape) for group in plan.groups for t in group] == [
        (name, tensor.dtype, tuple(tensor.shape)) for name, tensor in whole.items()
    ]
    held, groups = plan.held_names(), [[tensor.name for tensor in group] for group in plan.groups]
    batches = [dict(pair for stack in batch for pair in unstacked(stack)) for batch in plan.batches(Receivers.STAGE)]
    assert [list(batch) for batch in batches] == [group for group in groups if held & set(group)]
    found = {name: tensor for batch in batches for name, tensor in batch.items() if tensor is not None}
    assert found.keys() == held and all(torch.equal(tensor, whole[name]) for name, tensor in found.items())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, held)
    assert set().union(*everyone) == whole.keys()
    kinds = sum(len({(tensor.dtype, ".experts." in tensor.name) for tensor in group}) for group in plan.groups)
    for receivers, most in ((Receivers.FIRST, kinds), (Receivers.ALL, kinds * dist.get_world_size())):
        calls = collectives(lambda receivers=receivers: list(plan.stacks(receivers)))
        assert calls.total() <= most and calls.keys() <= {"broadcast", "batch_isend_irecv"}, calls


def check_shares(plan: SyncPlan, whole: Mapping[str, Tensor]) -> None:
    """Check that the parts of all ranks, at the described rows, are the full tensors."""
    described = {tensor.name: tensor for group in plan.groups for tensor in group}
    uneven = {name for name, tensor in described.items() if not tensor.split.is_even}
    own = {owner: (seat, dict(plan.shares(owner))) for owner in plan.owners() if (seat := plan.seat(owner))}
    for owner in own:  # the full tensors of those that no mesh describes
        gathered = {name: tensor for name, tensor in plan.shares(owner, uneven) if name in uneven}
        assert all(torch.equal(tensor, whole[name]) for name, tensor in gathered.items())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    rows: dict[str, set[int]] = {name: set() for name in whole}
    for owner in plan.owners():
        members = [found[owner] for found in everyone if owner in found]
        assert sorted(seat.number for seat, _ in members) == list(range(members[0][0].ranks * members[0][0].replicas))
        for seat, shares in members:
            for name, part in shares.items():
                dim, full = described[name].split.dim, whole[name]
                rank = seat.number % seat.ranks
                if name not in uneven:  # as on a mesh of replicas and parts
                    assert torch.equal(part, full.chunk(seat.ranks, dim)[rank])
                ends = [(0, len(full))] if dim is None else described[name].split.intervals[rank]
                place = [row for start, end in ends for row in range(start, end)]
                assert torch.equal(part, full.index_select(dim or 0, torch.tensor(place, dtype=torch.long))), name
                rows[name] |= set(place)
                assert described[name].owner == owner
    assert all(rows[name] == set(range(t.shape[t.split.dim or 0])) for name, t in described.items())


def collectives(way: Callable[[], Any]) -> Counter[str]:
    """Return how often this rank calls which function that communicates."""
    calls: Counter[str] = Counter()
    names = ("gather", "all_gather", "all_reduce", "send", "recv", "scatter", "barrier")
    names += ("broadcast", "batch_isend_irecv", "all_gather_into_tensor", "all_gather_object", "broadcast_object_list")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            original = getattr(dist, name)

            def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
                calls[name] += 1
                return original(*args, **kwargs)

            patch.setattr(dist, name, counted)
        way()
    return calls


def check_ways_out(engine: MegatronEngine, limit: int = 60_000) -> None:
    """Check that the weights in buckets, on every rank and in groups equal the full tensors of rank 0."""
    plan = sync_plan(engine)
    whole = {name: tensor.clone() for name, tensor in hf_tensors(engine)}
    everywhere = {name: tensor.clone() for name, tensor in hf_tensors(engine, plan, Receivers.ALL)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, everywhere)
    check_plan(plan, everywhere)
    check_shares(plan, everywhere)
    memories, arrived, lasts = [BucketMemory(), BucketMemory()], {}, []
    for memory, last in weight_buckets(engine, memories, torch.float32, limit):
        _, tensors = map_bucket(**memory.describe())
        assert memory.size <= limit or len(tensors) == 1
        arrived |= {name: tensor.clone() for name, tensor in tensors}
        lasts.append(last)
    for memory in memories:
        memory.close()
    if dist.get_rank() == 0:
        assert list(everywhere) == list(arrived) == list(whole)
        assert all(identical(whole, other) for other in (arrived, *everyone))
        assert len(lasts) > 2 and lasts == [False] * (len(lasts) - 1) + [True]
    else:
        assert not whole and not arrived


@operation
def follow(job: Job, root: Path) -> None:
    """Follow a student in training; then follow it again from a checkpoint before the last update, in a new model."""
    layout = layouts.LAYOUTS[job["layout"]]
    for model, dtype in FOLLOWED.items():
        path = layouts.model_path(root, model)
        start = load_file(f"{path}/model.safetensors")
        students = [learned(start, times) for times in range(FOLLOWED_TIMES)]
        for decay in DECAYS:
            name, saved = f"{job['name']}-{model}-{decay}", root / f"{job['name']}-{model}-{decay}.saved"
            devices = tuple(range(layout.world_size))
            limits = MicroBatchLimits(tokens=100)
            plan = FollowingPlan(name, ModelPlan(path, dtype), devices, layout, limits, ema_decay=decay)
            follower = MegatronFollower(plan, seed=0)
            untouched = weights(follower)
            in_parts(follower, start)
            if not identical(untouched, weights(follower)):
                raise RuntimeError("a model that follows what it is has changed")
            for student in students[:-1]:
                in_parts(follower, student)
            follower.save(saved)
            in_parts(follower, students[-1])
            once = weights(follower)
            check_ways_out(follower)
            write_arrays(root / f"{name}.npz", follower.compute_logprobs(data.sequences(layouts.VOCABULARY), 1.0))
            follower.save(root / f"{name}.hf")
            parallel.shutdown()
            meet_anew(root / f"port-{name}-again")
            follower = MegatronFollower(plan, seed=0)
            dist.barrier()
            follower.load(saved)
            in_parts(follower, students[-1])
            if not identical(once, weights(follower)):
                raise RuntimeError("a resumed follower is another one")
            parallel.shutdown()
            meet_anew(root / f"port-{name}-next")


@jobs
def follow_jobs() -> Iterator[Job]:
    for layout in FOLLOW_LAYOUTS:
        yield {"op": "follow", "name": f"follow-{layout}", "layout": layout}
