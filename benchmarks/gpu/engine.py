"""Our side, on one device: errors of its numbers, and its speed. Prints one JSON object.

Legend: M tokens, E hidden size, V vocabulary.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from batches import ALPHA, BETA, OBJECTIVES, PROMPT, TEMPERATURE, samples, sequences
from safetensors.torch import load_file
from shapes import SHAPES, Shape

from roll_opd.config.plan import Layout, MicroBatchLimits, ModelPlan, ObjectivePlan, OptimizerPlan, TrainPlan
from roll_opd.config.schema import Dtype
from roll_opd.megatron import parallel
from roll_opd.megatron.engine import MegatronEngine
from roll_opd.megatron.export import hf_tensors, weight_buckets
from roll_opd.megatron.logprobs_and_topk import vocab_parallel_logprobs
from roll_opd.megatron.student_engine import MegatronTrainer
from roll_opd.megatron.training_state import load_state, save_state
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.megatron.weights.fused_experts import as_stored
from roll_opd.models.flops import TRAINED, sequence_flops
from roll_opd.models.model_info import read_model
from roll_opd.samples.weight_bucket import BucketMemory

ROUNDS = 3  # timed rounds, after one round that is not timed; the median counts
HEAD_TOKENS = 4096
COMPARED: tuple[Dtype, ...] = ("fp32", "bf16")


def main() -> int:
    """Measure the requested parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, required=True)
    parser.add_argument(
        "--dtype", default="bf16", help="dtype of all parts except numerics, which measures both dtypes"
    )
    parser.add_argument("--compared", nargs="+", choices=COMPARED, default=COMPARED, help="dtypes of numerics")
    options = parser.parse_args()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    found: dict[str, Any] = {"device": device_name()}
    parts = PARTS | {"numerics": partial(numerics, dtypes=options.compared)}
    for part in options.parts:
        try:
            found[part] = parts[part](options.directory, SHAPES[options.shape], options.dtype)
        except torch.cuda.OutOfMemoryError as error:
            found[part] = {"out_of_memory": str(error).splitlines()[0]}
    print(json.dumps(found))
    return 0


def plan(directory: Path, dtype: Dtype, shape: Shape, learning_rate: float = 1e-4) -> TrainPlan:
    """Return a student on one device."""
    limits = MicroBatchLimits(tokens=shape.pack)
    optimizer = OptimizerPlan(learning_rate=learning_rate, min_learning_rate=learning_rate)
    model = ModelPlan(str(directory / "student"), dtype)
    return TrainPlan("student", model, (0,), Layout(), limits, train_limits=limits, optimizer=optimizer)


@contextmanager
def running(make: Callable[[], Any]) -> Iterator[Any]:
    """Yield an engine, and destroy its process groups afterwards."""
    engine = make()
    try:
        yield engine
    finally:
        del engine
        parallel.shutdown()
        gc.collect()  # engines are in cycles of references, and Python does not know how much device memory they hold
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def numerics(directory: Path, shape: Shape, _: Dtype, dtypes: Sequence[Dtype] = COMPARED) -> dict[str, Any]:
    """Compare the engine with `reference.py`, in f32 and in bf16 by default, and compare repeated runs."""
    reference = np.load(directory / "reference.npz")
    tokens = sequences(shape.vocab, 4, min(shape.length, 512))
    return {dtype: compared(directory, shape, dtype, tokens, reference) for dtype in dtypes}


def compared(
    directory: Path, shape: Shape, dtype: Dtype, tokens: Sequence[np.ndarray], reference: Any
) -> dict[str, Any]:
    """Return the differences of one dtype from Hugging Face's f32, and whether a repeated run, a resumed run and an
    export agree."""
    found: dict[str, Any] = {}
    still = plan(directory, dtype, shape, learning_rate=0.0)  # every objective is measured with the same weights
    asked = [(one, PROMPT) for one in tokens]
    found["theirs_mean"] = distances(
        reference, [reference[f"{dtype} {number}"] for number in range(len(tokens))]
    ).mean()
    with running(lambda: MegatronEngine(still, seed=0, deterministic=False)) as engine:
        off = distances(reference, engine.compute_logprobs(asked, TEMPERATURE))
        found |= {"fast_mean": off.mean(), "fast_max": off.max()}
    with running(lambda: MegatronTrainer(still, seed=0)) as trainer:
        off = distances(reference, trainer.compute_logprobs(asked, TEMPERATURE))
        found |= {"logprob_mean": off.mean(), "logprob_max": off.max()}
        files = (directory / "student").glob("*.safetensors")
        source = {name: tensor for file in files for name, tensor in load_file(file).items()}
        written = as_stored(hf_tensors(trainer), read_model(directory / "student"))
        exported = {name: tensor.cpu() for name, tensor in written}
        found["export_equal"] = all(
            torch.equal(exported[name], source[name].to(exported[name].dtype)) for name in source
        )
        trainer.load_teacher_head("teacher", reference["head"], float(reference["logit cap"]) or None)
        for objective, divergence in OBJECTIVES.items():
            settings: dict[str, Any] = {
                "opd_objective": objective.split()[0],
                "opd_jsd_beta": BETA,
                "opd_skew_alpha": ALPHA,
            }
            settings |= {"opd_divergence": divergence} if divergence else {}
            done = trainer.update(samples(tokens, reference, objective), ObjectivePlan(**settings), TEMPERATURE)
            wanted_loss, wanted_norm = float(reference[f"loss {objective}"]), float(reference[f"norm {objective}"])
            found[objective] = {
                "loss": abs(done.sums["weighted_loss"] - wanted_loss) / abs(wanted_loss),
                "gradient_norm": abs(done.grad_norm - wanted_norm) / wanted_norm,
            }
    batch, saved = samples(tokens, reference, "sampled"), directory / f"state-{dtype}"
    ends = []
    for turn in range(3):
        with running(lambda: MegatronTrainer(plan(directory, dtype, shape), seed=0)) as trainer:
            if turn < 2:
                trainer.update(batch, ObjectivePlan(), TEMPERATURE)
            if turn == 1:
                saved.mkdir()
                save_state(trainer, saved)()
            if turn == 2:
                load_state(trainer, saved)
            trainer.update(batch, ObjectivePlan(), TEMPERATURE)
            written = as_stored(hf_tensors(trainer), read_model(directory / "student"))
            ends.append({name: tensor.to("cpu", copy=True) for name, tensor in written})
    found["twice_equal"] = all(torch.equal(ends[1][name], ends[0][name]) for name in ends[0])
    found["resumed_equal"] = all(torch.equal(ends[2][name], ends[0][name]) for name in ends[0])
    found["learned"] = any(not torch.equal(ends[0][name], exported[name]) for name in ends[0])
    return {name: float(value) if isinstance(value, np.floating) else value for name, value in found.items()}


def distances(reference: Any, logprobs: Any) -> np.ndarray:
    """Return the differences between the log-probs of every sequence and Hugging Face's f32 log-probs, token by
    token."""
    return np.concatenate([np.abs(logprobs[n] - reference[f"fp32 {n}"]) for n in range(len(logprobs))])


def train(directory: Path, shape: Shape, dtype: Dtype) -> dict[str, Any]:
    """Time whole updates: forward and backward passes, optimizer."""
    tokens = [one for one in sequences(shape.vocab, shape.sequences, shape.length)]
    fixed = {f"teacher {number}": np.zeros(len(one) - PROMPT, np.float32) for number, one in enumerate(tokens)}
    batch = samples(tokens, fixed, "sampled")
    with running(lambda: MegatronTrainer(plan(directory, dtype, shape), seed=0, deterministic=False)) as trainer:
        seconds = timed(lambda: trainer.update(batch, ObjectivePlan(), 1.0))
        return speed(directory, tokens, seconds, TRAINED) | {"peak_bytes": peak_bytes()}


def teacher(directory: Path, shape: Shape, dtype: Dtype) -> dict[str, Any]:
    """Time the log-probs of a frozen model."""
    tokens = sequences(shape.vocab, shape.sequences, shape.length)
    asked = [(one, PROMPT) for one in tokens]
    with running(lambda: MegatronEngine(plan(directory, dtype, shape), seed=0, deterministic=False)) as engine:
        seconds = timed(lambda: engine.compute_logprobs(asked, 1.0))
        return speed(directory, tokens, seconds, 1) | {"peak_bytes": peak_bytes()}


def speed(directory: Path, tokens: Sequence[np.ndarray], seconds: float, passes: int) -> dict[str, float]:
    """Return tokens and model FLOPs per second (`models.flops`)."""
    model = read_model(directory / "student")
    counts = [len(one) for one in tokens]
    flops = passes * sum(sequence_flops(model, count, count - PROMPT) for count in counts)
    return {"seconds": seconds, "tokens_a_second": sum(counts) / seconds, "flops_a_second": flops / seconds}


def export(directory: Path, shape: Shape, dtype: Dtype) -> dict[str, float]:
    """Time the export of all weights in Hugging Face's names and shapes: on the device, and as buckets in host
    memory."""
    with running(lambda: MegatronEngine(plan(directory, dtype, shape), seed=0, deterministic=False)) as engine:
        size = sum(tensor.nbytes for _, tensor in hf_tensors(engine))
        on_device = timed(lambda: [None for _ in hf_tensors(engine)])
        memories = [BucketMemory(), BucketMemory()]
        to_host = timed(lambda: [None for _ in weight_buckets(engine, memories, DTYPES[dtype])])
    return {"bytes": size, "device_bytes_a_second": size / on_device, "host_bytes_a_second": size / to_host}


def head(_: Path, shape: Shape, dtype: Dtype) -> dict[str, Any]:
    """Time token log-probs and their backward pass, chunked and eager, and measure the additional memory of each."""
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    group: Any = torch.distributed.group.WORLD
    device, kind = torch.device("cuda" if torch.cuda.is_available() else "cpu"), DTYPES[dtype]
    generator = torch.Generator(device).manual_seed(0)
    rows = min(HEAD_TOKENS, shape.pack)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device).to(kind).requires_grad_()

    hidden_ME, weight_VE = random(rows, shape.hidden), random(shape.vocab, shape.hidden)
    targets_M = torch.randint(shape.vocab, (rows,), generator=generator, device=device)
    scale = 4 / shape.hidden**0.5  # logits differ by about 4

    def eager() -> torch.Tensor:
        logits_MV = (hidden_ME @ weight_VE.T).float() * scale
        return logits_MV.log_softmax(-1).gather(1, targets_M[:, None])[:, 0]

    def chunked() -> torch.Tensor:
        return vocab_parallel_logprobs(hidden_ME, VocabShard(weight_VE, 1 / scale, shape.vocab, group), targets_M)

    found: dict[str, Any] = {"tokens": rows}
    values = {}
    for name, way in (("eager", eager), ("chunked", chunked)):

        def whole(way: Callable[[], torch.Tensor] = way) -> None:
            hidden_ME.grad = weight_VE.grad = None
            way().sum().backward()

        before = reset_peak()
        with torch.no_grad():
            values[name] = way()
        found[name] = {"seconds": timed(whole), "extra_bytes": (peak_bytes() or 0) - before if before else None}
    with torch.no_grad():
        exact_MV = hidden_ME.double() @ weight_VE.double().T * scale
        exact_M = exact_MV.log_softmax(-1).gather(1, targets_M[:, None])[:, 0]
    for name, value in values.items():
        found[name]["off"] = (value - exact_M).abs().mean().item()
    torch.distributed.destroy_process_group()
    return found


def timed(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the median seconds of a call that runs on the device."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return median(seconds[1:])


def reset_peak() -> int:
    """Reset the peak of the device's memory; return the allocated bytes. On a CPU nothing is measured, and 0 is
    returned."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak_bytes() -> int | None:
    """Return the peak of the device's allocated bytes; None on a CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None


def device_name() -> str:
    """Return the name of the measured device."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PARTS: dict[str, Callable[[Path, Shape, Dtype], dict[str, Any]]] = {
    "numerics": numerics,
    "train": train,
    "teacher": teacher,
    "export": export,
    "head": head,
}

if __name__ == "__main__":
    sys.exit(main())
