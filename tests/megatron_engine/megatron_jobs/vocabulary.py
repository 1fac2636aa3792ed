"""Log-probs, top-k, divergences and entropy over a split vocabulary, and their memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import megatron_layouts as layouts
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron_layouts import VOCABULARY
from megatron_ranks import Job, write_json, write_results
from megatron_registry import jobs, operation
from torch.utils._python_dispatch import TorchDispatchMode

from roll_opd.megatron import parallel
from roll_opd.megatron.logprobs_and_topk import (
    TEMPORARIES,
    vocab_parallel_logprobs,
    vocab_parallel_moments,
    vocab_parallel_topk,
)
from roll_opd.megatron.vocabulary import VocabShard
from roll_opd.megatron.whole_vocabulary_divergence import (
    shard_of_head,
    vocab_parallel_divergence,
    vocab_parallel_entropy,
)
from roll_opd.objective.divergences import divergence, topk_divergence


def vocab_inputs(rows: int, width: int, vocabulary: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return hidden states, output embedding, targets, and the incoming gradient."""
    rng = np.random.default_rng(7)
    return (
        rng.normal(size=(rows, width)).astype(np.float32),
        rng.normal(size=(vocabulary, width)).astype(np.float32),
        rng.integers(0, vocabulary, size=rows),
        rng.normal(size=rows).astype(np.float32),
    )


def teacher_inputs(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return hidden states and the whole output embedding of a teacher, with another width and vocabulary size."""
    rng = np.random.default_rng(8)
    return (
        rng.normal(size=(rows, TEACHER_WIDTH)).astype(np.float32),
        rng.normal(size=(TEACHER_VOCABULARY, TEACHER_WIDTH)).astype(np.float32),
    )


VOCAB_ROWS, VOCAB_WIDTH = 23, 16
TEACHER_WIDTH, TEACHER_VOCABULARY = 12, 97  # fewer columns than the student's: on two ranks they end inside the second
TOPK = (1, 5, VOCABULARY)
# temperature, top-k and top-p of the tokens in turn; 0: greedy
SETTINGS = ((0.7, -1, 1.0), (0.4, -1, 1.0), (1.3, 7, 1.0), (0.9, -1, 0.8), (1.0, 9, 0.6), (0.0, -1, 1.0))
TRUNCATIONS = ((-1, 1.0), (7, 1.0), (-1, 0.8), (9, 0.6))  # top-k and top-p
MEASURES = {
    "reverse_kl": {},
    "forward_kl": {},
    "jsd": {"beta": 0.3},
    "skewed_reverse_kl": {"alpha": 0.2},
    "skewed_forward_kl": {"alpha": 0.2},
}
VOCAB_CHUNK_ROWS = {"one": 1, "odd": 7, "all": 1000}


@dataclass(frozen=True)
class Shard:
    """This rank's part of a vocabulary; its padded rows have large numbers, which must not count."""

    group: dist.ProcessGroup
    each: int  # rows of the output embedding on each rank

    @property
    def ranks(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def first(self) -> int:
        return dist.get_rank(self.group) * self.each

    def rows(self, weight: np.ndarray) -> torch.Tensor:
        padded = np.full((self.each * self.ranks, weight.shape[1]), 50.0, np.float32)
        padded[: len(weight)] = weight
        return torch.from_numpy(padded[self.first : self.first + self.each]).requires_grad_()

    def gradients(self, hidden_ME: torch.Tensor, weight_grad_VE: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        dist.all_reduce(hidden_ME.grad, group=self.group)
        shards = [torch.zeros_like(weight_grad_VE) for _ in range(self.ranks)]
        dist.all_gather(shards, weight_grad_VE, group=self.group)
        return hidden_ME.grad.numpy(), torch.cat(shards).numpy()


def vocabulary(job: Job) -> Shard:
    parallel.initialize(layouts.LAYOUTS[job["layout"]], seed=0)
    group = parallel_state.get_tensor_model_parallel_group()
    return Shard(group, layouts.VOCABULARY // dist.get_world_size(group) + 1)


@operation
def vocab(job: Job, root: Path) -> None:
    """Compute log-probs and gradients for every chunk size."""
    shard = vocabulary(job)
    hidden, weight, targets, incoming = vocab_inputs(VOCAB_ROWS, VOCAB_WIDTH, layouts.VOCABULARY)
    results = {}
    for name, rows in VOCAB_CHUNK_ROWS.items():
        for temperature in (1.0, 0.7):
            hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
            chunk_bytes = 4 * shard.each * rows
            part = VocabShard(weight_VE, temperature, layouts.VOCABULARY, shard.group, chunk_bytes=chunk_bytes)
            logprobs_M = vocab_parallel_logprobs(hidden_ME, part, torch.from_numpy(targets))
            logprobs_M.backward(torch.from_numpy(incoming))
            key = f"{name}-{temperature}"
            results[f"{key}-logprobs"] = logprobs_M.detach().numpy()
            results[f"{key}-hidden"], results[f"{key}-weight"] = shard.gradients(hidden_ME, weight_VE.grad)
    write_results(root / f"{job['name']}.npz", results)


@operation
def columns(job: Job, root: Path) -> None:
    """Compute divergences and entropy; the gradient of the weight is added to a buffer that is not zero."""
    shard = vocabulary(job)
    hidden, weight, _, incoming = vocab_inputs(VOCAB_ROWS, VOCAB_WIDTH, layouts.VOCABULARY)
    teacher_hidden, teacher_weight = (torch.from_numpy(x) for x in teacher_inputs(VOCAB_ROWS))
    teacher_shard = shard_of_head(teacher_weight, first=shard.first, columns=shard.each)
    results = {}
    for chunks, rows in VOCAB_CHUNK_ROWS.items():
        for temperature in (1.0, 0.7):
            for measure in (*MEASURES, "entropy"):
                hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
                grad_VE = torch.ones_like(weight_VE)
                size = layouts.VOCABULARY if measure == "entropy" else TEACHER_VOCABULARY
                part = VocabShard(weight_VE, temperature, size, shard.group, grad_VE, 4 * shard.each * rows)
                if measure == "entropy":
                    found_M = vocab_parallel_entropy(hidden_ME, part)
                else:
                    kind = divergence(measure, **MEASURES[measure])
                    found_M = vocab_parallel_divergence(hidden_ME, part, teacher_hidden, teacher_shard, kind)
                found_M.backward(torch.from_numpy(incoming))
                key = f"{measure}-{chunks}-{temperature}"
                results[key] = found_M.detach().numpy()
                results[f"{key}-hidden"], results[f"{key}-weight"] = shard.gradients(hidden_ME, grad_VE - 1)
                if weight_VE.grad is not None:
                    raise RuntimeError("the gradient was returned as well")
    write_results(root / f"{job['name']}.npz", results)


@operation
def topk(job: Job, root: Path) -> None:
    """Compute the most likely tokens, their log-probs by the other function, and the gradient of a divergence."""
    shard = vocabulary(job)
    hidden, weight, _, incoming = vocab_inputs(VOCAB_ROWS, VOCAB_WIDTH, layouts.VOCABULARY)
    results = {}
    for k in TOPK:
        hidden_ME, weight_VE = torch.from_numpy(hidden).requires_grad_(), shard.rows(weight)
        part = VocabShard(weight_VE, 0.7, layouts.VOCABULARY, shard.group, chunk_bytes=4 * shard.each * 7)
        ids_MK, logprobs_ML = vocab_parallel_topk(hidden_ME, part, k)
        again_ML = vocab_parallel_logprobs(hidden_ME, part, ids_MK, with_rest=True)
        shares = torch.tensor([1.0] * k + [layouts.VOCABULARY - k]) / layouts.VOCABULARY
        uniform_ML = shares.log().expand_as(again_ML)
        topk_divergence(again_ML, uniform_ML, divergence("reverse_kl")).backward(torch.from_numpy(incoming))
        results |= {f"{k}-ids": ids_MK.numpy(), f"{k}-logprobs": logprobs_ML.numpy()}
        results[f"{k}-again"] = again_ML.detach().numpy()
        results[f"{k}-hidden"], results[f"{k}-weight"] = shard.gradients(hidden_ME, weight_VE.grad)
    write_results(root / f"{job['name']}.npz", results)


@operation
def moments(job: Job, root: Path) -> None:
    """Compute the moments of the sampling distribution, with and without top-k and top-p."""
    shard = vocabulary(job)
    hidden, weight, targets, _ = vocab_inputs(VOCAB_ROWS, VOCAB_WIDTH, layouts.VOCABULARY)
    results = {}
    for name, rows in VOCAB_CHUNK_ROWS.items():
        for top_k, top_p in TRUNCATIONS:
            chunk_bytes = 4 * shard.each * rows * TEMPORARIES
            part = VocabShard(shard.rows(weight), 0.7, layouts.VOCABULARY, shard.group, chunk_bytes=chunk_bytes)
            settings_M3 = torch.tensor([[0.7, top_k, top_p]]).expand(VOCAB_ROWS, -1)
            found_MX = vocab_parallel_moments(torch.from_numpy(hidden), part, torch.from_numpy(targets), settings_M3)
            results[f"{name}-{top_k}-{top_p}"] = found_MX.numpy()
        settings_M3 = torch.tensor(SETTINGS).repeat(VOCAB_ROWS, 1)[:VOCAB_ROWS]
        found_MX = vocab_parallel_moments(torch.from_numpy(hidden), part, torch.from_numpy(targets), settings_M3)
        results[f"{name}-settings"] = found_MX.numpy()
    write_results(root / f"{job['name']}.npz", results)


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, tuple | list) else [result]:
            if isinstance(value, torch.Tensor):
                self.bytes = max(self.bytes, value.untyped_storage().nbytes())
        return result


@operation
def memory(job: Job, root: Path) -> None:
    parallel.initialize(layouts.LAYOUTS[job["layout"]], seed=0)
    hidden, weight, targets, incoming = vocab_inputs(256, 8, 20_000)
    group = parallel_state.get_tensor_model_parallel_group()
    others = {
        "logprobs": (vocab_parallel_logprobs, (torch.from_numpy(targets),)),
        "divergence": (
            vocab_parallel_divergence,
            (torch.from_numpy(hidden), torch.from_numpy(weight), divergence("jsd")),
        ),
    }
    sizes: dict[str, dict[int, int]] = {}
    for name, (function, arguments) in others.items():
        for chunk_bytes in (2**20, 2**30):
            with LargestTensor() as largest:
                weight_VE = torch.from_numpy(weight).requires_grad_()
                part = VocabShard(weight_VE, 0.7, 20_000, group, chunk_bytes=chunk_bytes)
                found_M = function(torch.from_numpy(hidden).requires_grad_(), part, *arguments)
                found_M.backward(torch.from_numpy(incoming))
            sizes.setdefault(name, {})[chunk_bytes] = largest.bytes
    write_json(root / "memory.json", sizes)


@jobs
def vocabulary_jobs() -> Iterator[Job]:
    for layout in ("tp1", "tp2"):
        for op in ("vocab", "columns", "topk", "moments"):
            yield {"op": op, "name": f"{op}-{layout}", "layout": layout}
    yield {"op": "memory", "name": "memory", "layout": "tp1"}
