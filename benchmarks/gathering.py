"""Seconds and collectives of gathering a model's full tensors from four gloo ranks, beside one large broadcast.

    python benchmarks/gathering.py [--case NAME ...] [--rounds 5] [--earlier stream.py] [--json OUT]

A case has the tensors of a mixture of experts with 94 layers and 128 experts, or of a dense model with 28 layers; both
are narrower than a real model. README.md explains the columns.
"""

import argparse
import gc
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from pipeline_run import machine

from roll_opd.models.families.parameter_names import Slicing

RANKS = 4
MIXTURE = {"layers": 94, "hidden": 128, "width": 48, "experts": 128}
DENSE = {"layers": 28, "hidden": 1024, "width": 2816, "experts": 0}
VOCAB = 8192
CASES: dict[str, tuple[dict[str, int], dict[str, int]]] = {  # name -> sizes of the model, layout
    "mixture tp2 pp2": (MIXTURE, {"tp": 2, "pp": 2}),
    "mixture ep2 pp2": (MIXTURE, {"tp": 2, "pp": 2, "ep": 2, "etp": 1}),
    "24 layers tp2 pp2": ({**MIXTURE, "layers": 24}, {"tp": 2, "pp": 2}),  # few enough for `--earlier`
    "dense tp2 pp2": (DENSE, {"tp": 2, "pp": 2}),
}
COLLECTIVES = ("gather", "broadcast", "send", "recv", "batch_isend_irecv", "all_gather_object")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; the median counts")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="stream.py of a version that gathers by parameter")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures here")
    parser.add_argument("--rank-of", nargs=2, help=argparse.SUPPRESS)  # for a process that measures: case, result
    options = parser.parse_args(arguments)
    if options.rank_of:
        measure(options.rank_of[0], options.rounds, options.earlier, Path(options.rank_of[1]))
        return 0
    found = {case: figures_of(case, options.rounds, options.earlier) for case in options.case}
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps({"cases": found, "machine": machine()}, indent=1) + "\n")
    return 0


def figures_of(case: str, rounds: int, earlier: Path | None) -> dict[str, Any]:
    """Run the ranks of a case, and return the figures of rank 0."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "figures.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}", __file__]
        command += [f"--rounds={rounds}", *([f"--earlier={earlier}"] if earlier else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "THP_MEM_ALLOC_ENABLE": "1"}  # as in a run
        subprocess.run([*command, "--rank-of", case, str(result)], check=True, env=environment)
        return json.loads(result.read_text())


def table(found: dict[str, dict[str, Any]]) -> str:
    """Return the figures as a table."""
    lines = [
        f"{'case':18}{'tensors':>8}{'MB':>6}  {'what':22}{'s':>7}{'GB/s':>7}{'of the broadcast':>17}{'collectives':>13}"
    ]
    for case, figures in found.items():
        for what, seconds in figures["seconds"].items():
            rate, share = figures["bytes"] / seconds / 1e9, figures["seconds"]["broadcast"] / seconds
            lines.append(
                f"{case:18}{figures['tensors']:8}{figures['bytes'] / 1e6:6.0f}  {what:22}{seconds:7.3f}{rate:7.2f}"
                f"{share:16.0%} {figures['collectives'][what]:12}"
            )
    return "\n".join(lines)


def measure(case: str, rounds: int, earlier: Path | None, result: Path) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    import torch
    import torch.distributed as dist

    from roll_opd.config.plan import Layout
    from roll_opd.megatron import parallel
    from roll_opd.megatron.weights.sync_plan import Receivers, SyncPlan
    from roll_opd.megatron.weights.tensor_slices import SliceSizes
    from roll_opd.samples.weight_bucket import BUCKET_BYTES, BucketMemory, bucketed

    sizes, layout = CASES[case]
    parallel.initialize(Layout(**dict[str, Any](layout)), seed=0, deterministic=False)
    gc.collect()
    gc.freeze()  # imported objects, as in the processes of a run: forks of a server that has frozen them
    parameters = list(shards_of(**sizes))
    heads = SliceSizes(heads=8, kv_heads=4, vocab=VOCAB, padded_vocab=VOCAB)
    began = time.perf_counter()
    plan = SyncPlan(parameters, heads)
    planned = time.perf_counter() - began
    full = {tensor.name: (tensor.dtype, tensor.shape) for group in plan.groups for tensor in group}
    size = sum(math.prod(shape) * dtype.itemsize for dtype, shape in full.values())
    whole = torch.zeros(size, dtype=torch.uint8)
    memories = [BucketMemory(), BucketMemory()]

    def rank_0s() -> Iterator[Any]:
        return (stack for stack in plan.stacks(Receivers.FIRST) if stack[1] is not None)

    ways: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(whole, 0),
        "into shared memory": lambda: exhaust(bucketed(rank_0s(), memories, torch.bfloat16, BUCKET_BYTES)),
        "to rank 0": lambda: exhaust(plan.stacks(Receivers.FIRST)),
        "to all ranks": lambda: exhaust(plan.stacks(Receivers.ALL)),
        "within stages": lambda: exhaust(plan.stacks(Receivers.STAGE)),
    }
    if earlier:
        spec = importlib.util.spec_from_file_location("earlier", earlier)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules["earlier"] = module
        spec.loader.exec_module(module)
        ways["earlier, to rank 0"] = lambda: exhaust(module.gather_to_rank_0(parameters, heads))
        ways["earlier, to all ranks"] = lambda: exhaust(module.gather_to_all_ranks(parameters, heads, full))
        check_same(dict(plan.tensors(Receivers.FIRST)), module.gather_to_rank_0(parameters, heads))
    seconds: dict[str, list[float]] = {what: [] for what in ways}
    calls = {what: count(way) for what, way in ways.items()}
    for _ in range(rounds):
        for what, way in ways.items():
            dist.barrier()
            began = time.perf_counter()
            way()
            dist.barrier()
            seconds[what].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        figures = {
            "tensors": len(full),
            "groups": len(plan.groups),
            "bytes": size,
            "plan_seconds": planned,
            "seconds": {what: median(values) for what, values in seconds.items()},
            "all_seconds": seconds,
            "collectives": calls,
        }
        result.write_text(json.dumps(figures))
    parallel.shutdown()


def shards_of(layers: int, hidden: int, width: int, experts: int) -> Iterator[tuple[Any, Callable[[], Any]]]:
    """Yield this rank's shards, with functions that return their values, as a Megatron model has them."""
    import torch
    from megatron.core import parallel_state

    from roll_opd.megatron.parallel import tensor_rank
    from roll_opd.megatron.weights import tensor_slices

    def shard(names: Sequence[Sequence[str]], slicing: Slicing, *shape: int, is_expert: bool = False) -> Any:
        value = torch.randn(*shape).bfloat16()
        described = shard_class()(
            tuple(map(tuple, names)), tensor_slices.SLICINGS[slicing], value.shape, value.dtype, is_expert
        )
        return described, lambda: value

    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_world_size(),
    )
    ranks, expert_tensor_ranks = tensor_rank()[1], tensor_rank(expert=True)[1]
    expert_ranks = parallel_state.get_expert_model_parallel_world_size()
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank() + 10 * stage)
    head = hidden // 8
    if stage == 0:
        yield shard([["model.embed_tokens.weight"]], "vocabulary", VOCAB // ranks, hidden)
    for layer in range(stage * layers // stages, (stage + 1) * layers // stages):
        of = f"model.layers.{layer}"
        yield shard([[f"{of}.input_layernorm.weight"]], "replicated", hidden)
        yield shard([[f"{of}.self_attn.{x}_proj.weight" for x in "qkv"]], "qkv", 16 * head // ranks, hidden)
        yield shard([[f"{of}.self_attn.o_proj.weight"]], "columns", hidden, hidden // ranks)
        yield shard([[f"{of}.post_attention_layernorm.weight"]], "replicated", hidden)
        if not experts:
            yield shard([[f"{of}.mlp.{x}_proj.weight" for x in ("gate", "up")]], "gate_up", 2 * width // ranks, hidden)
            yield shard([[f"{of}.mlp.down_proj.weight"]], "columns", hidden, width // ranks)
            continue
        yield shard([[f"{of}.mlp.gate.weight"]], "replicated", experts, hidden)
        local, part = experts // expert_ranks, width // expert_tensor_ranks
        for expert in range(local):
            each = [f"{of}.mlp.experts.{expert + rank * local}" for rank in range(expert_ranks)]
            both = [[f"{one}.gate_proj.weight", f"{one}.up_proj.weight"] for one in each]
            yield shard(both, "gate_up", 2 * part, hidden, is_expert=True)
            yield shard([[f"{one}.down_proj.weight"] for one in each], "columns", hidden, part, is_expert=True)
    if stage == stages - 1:
        yield shard([["model.norm.weight"]], "replicated", hidden)
        yield shard([["lm_head.weight"]], "vocabulary", VOCAB // ranks, hidden)


def shard_class() -> Any:
    from roll_opd.megatron.weights.sync_plan import ParameterShard

    return ParameterShard


def exhaust(tensors: Iterator[Any]) -> None:
    for _ in tensors:
        pass


def check_same(found: dict[str, Any], wanted: Iterator[tuple[str, Any]]) -> None:
    """Raise an error if the earlier tensors have other bits."""
    count = 0
    for name, tensor in wanted:
        count += 1
        if not tensor.equal(found[name]):
            raise RuntimeError(f"{name} differs")
    if count != len(found):
        raise RuntimeError(f"{len(found)} tensors instead of {count}")


def count(way: Callable[[], Any]) -> int:
    """Return how many collectives this rank calls."""
    import torch.distributed as dist

    calls: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in COLLECTIVES}
    for name, original in originals.items():

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        setattr(dist, name, counted)
    way()
    for name, original in originals.items():
        setattr(dist, name, original)
    return calls.total()


if __name__ == "__main__":
    sys.exit(main())
