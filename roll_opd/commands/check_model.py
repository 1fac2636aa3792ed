"""`roll-opd check-model`: compare a model's log-probs with Hugging Face's, and check the exported weights.

The log-probs are computed by the training engine and by vLLM. Without the packages of an extra, only the files are
checked.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from roll_opd.base import hardware
from roll_opd.base.command_line import DONE, FAILED, USER_ERROR
from roll_opd.base.interpreter import REMEDY, lacking
from roll_opd.base.terminal import echo
from roll_opd.cluster.multihost import torch_ranks
from roll_opd.cluster.process_reaper import guarded
from roll_opd.cluster.ray_environment import run_temp_directory
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import Layout
from roll_opd.models.families import FAMILIES
from roll_opd.models.layouts import check_layout
from roll_opd.models.megatron_support import unsupported
from roll_opd.models.model_files import decoder_config, read_json, stored_tensors, weight_files
from roll_opd.models.model_info import ModelFilesError, ModelInfo, read_model, whole_model
from roll_opd.models.weight_files import lost_weights, weight_problems
from roll_opd.tracking.results_table import count_of

BOUND = 1e-5  # largest difference of log-probs in f32, multiplied by the largest absolute log-prob if that is above 1
HALF_BOUND = 3.0  # largest mean difference in bf16, as a multiple of Hugging Face's mean difference in bf16
SEQUENCES = 4
LENGTH = 96  # tokens of the longest sequence, unless an attention window is longer
MAX_LENGTH = 1024
TENSOR_RANKS = (1, 2)


def run(options: argparse.Namespace) -> int:
    """Print the comparisons. Return 0 if all of them agree, 1 if one disagrees, and 2 if the model cannot be used."""
    try:
        info = read_model(whole_model(options.model, echo))
        problems = [*unsupported(info.path), *weight_problems(info), *lost_weights(info)]
        if not info.weight_files:
            problems.append(f"{info.path} has no weights; give a complete model")
    except ModelFilesError as error:
        problems = [str(error)]
    if problems:
        echo("roll-opd check-model: " + "\n  ".join(problems), sys.stderr)
        return USER_ERROR
    shown = f"{info.model_type}, {count_of(info.parameters)} parameters in {len(info.tensors)} tensors"
    echo(f"ok   files: {shown}, complete, of a type that can be trained")
    if lack := lacking(needs_packages=True):
        echo(f"     log-probs and export are not compared, as {sys.executable} {lack}; {REMEDY}")
        return DONE
    sequences = _sequences(info, options.tokens)
    with guarded() as reaper, run_temp_directory(reaper), tempfile.TemporaryDirectory() as directory:
        rows = list(_rows(info, sequences, Path(directory), has_vllm=not options.no_vllm))
    for text, agrees in rows:
        echo(f"{'ok  ' if agrees else 'FAIL'} {text}")
    return DONE if all(agrees for _, agrees in rows) else FAILED


def _sequences(info: ModelInfo, tokens: int | None) -> list[list[int]]:
    """Return sequences of random tokens, with a fixed seed.

    `tokens` is the length of the longest sequence. If it is None, the longest sequence exceeds the model's attention
    windows, unless this needs more than `MAX_LENGTH` tokens.
    """
    windows = FAMILIES[info.model_type].pieces(decoder_config(read_json(info.path / "config.json"))).windows
    longest = min(tokens or max(LENGTH, min(max(windows, default=0) + 32, MAX_LENGTH)), info.max_positions - 1)
    generator = np.random.default_rng(0)
    lengths = [longest, *(max(2, longest // (2 + number)) for number in range(1, SEQUENCES))]
    return [generator.integers(0, info.vocab, size=length).tolist() for length in lengths]


def _rows(
    info: ModelInfo, sequences: list[list[int]], directory: Path, *, has_vllm: bool
) -> Iterator[tuple[str, bool]]:
    """Yield (text, ok) for each comparison: the result as text, and whether the log-probs or weights agree."""
    wanted = _hugging_face(info.path, "float32", sequences)
    for tp in TENSOR_RANKS:
        ranks = "one tensor rank" if tp == 1 else f"{tp} tensor ranks"
        etp = 1 if info.has_expert_bias else tp
        of_layout = Diagnostics()
        check_layout(info, Layout(tp=tp, etp=etp), {}, of_layout)
        if of_layout.problems:
            yield f"engine on {ranks}: skipped, as {'; '.join(of_layout.problems)}", True
            continue
        output = directory / f"tp{tp}"
        output.mkdir()
        settings = {"model": str(info.path), "tp": tp, "etp": etp, "sequences": sequences, "directory": str(output)}
        command = {"ranks": tp, "hosts": 1, "module": "roll_opd.megatron.check_model_ranks"}
        if torch_ranks.start({**command, "arguments": [json.dumps(settings)]}).wait():
            yield f"engine on {ranks}: it failed, see above", False
            continue
        yield _compared(f"engine on {ranks}", output, wanted)
        yield _exported(info, output / "hf", ranks)
    if has_vllm:
        output = directory / "vllm"
        output.mkdir()
        # vLLM's Gated DeltaNet on CPUs computes in bf16 only
        is_half = info.delta is not None and not hardware.gpus()
        settings = {"model": str(info.path), "sequences": sequences, "directory": str(output)}
        settings |= {"dtype": "bf16" if is_half else "fp32"}
        program = [sys.executable, "-m", "roll_opd.inference.check_model_engine", json.dumps(settings)]
        if subprocess.run(program, check=False).returncode:
            yield "vLLM: it failed, see above", False
        elif is_half:
            rounded = _hugging_face(info.path, "bfloat16", sequences)
            yield _compared_in_half("vLLM in bf16", output, wanted, rounded)
        else:
            yield _compared("vLLM", output, wanted)


def _hugging_face(path: Path, dtype: str, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Return Hugging Face's log-probs of the tokens 1 to T-1 of each sequence, f32 [T-1].

    The "eager" attention is used, because the other implementations ignore a model's cap on attention scores.
    """
    import torch
    from transformers import AutoModelForCausalLM

    kind = getattr(torch, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, attn_implementation="eager").eval()
    found = []
    for tokens in sequences:
        ids_T = torch.tensor(tokens)
        with torch.no_grad():
            logits_TV = model(ids_T[None]).logits[0, :-1].double()
        found.append(logits_TV.log_softmax(-1).gather(-1, ids_T[1:, None])[:, 0].float().numpy())
    return found


def _compared(what: str, directory: Path, wanted: Sequence[np.ndarray]) -> tuple[str, bool]:
    """Return (text, ok): the largest difference from Hugging Face's log-probs, and whether it is within the bound."""
    with np.load(directory / "logprobs.npz") as found:
        differences = [np.abs(found[str(number)] - values) for number, values in enumerate(wanted)]
    largest = float(max(values.max() for values in differences))
    bound = BOUND * max(1.0, float(max(np.abs(values).max() for values in wanted)))
    return (
        f"{what}: log-probs differ from Hugging Face's by at most {largest:.1e} (bound {bound:.1e})",
        largest <= bound,
    )


def _compared_in_half(
    what: str, directory: Path, wanted: Sequence[np.ndarray], rounded: Sequence[np.ndarray]
) -> tuple[str, bool]:
    """Return (text, ok): the mean difference from Hugging Face's log-probs in f32, and whether it is within the bound.

    The bound is a multiple of the rounding error of bf16, which is measured as the mean difference between `rounded`
    and `wanted`.

    Args:
        what: name of the engine.
        directory: directory with the engine's log-probs.
        wanted: Hugging Face's log-probs in f32, one array per sequence.
        rounded: Hugging Face's log-probs in bf16, one array per sequence.
    """
    with np.load(directory / "logprobs.npz") as file:
        found = np.concatenate([file[str(number)] for number in range(len(wanted))])
    exact = np.concatenate(wanted)
    distance, bound = (float(np.abs(values - exact).mean()) for values in (found, np.concatenate(rounded)))
    return (
        f"{what}: log-probs differ from Hugging Face's in f32 by {distance:.1e} on average (bound"
        f" {HALF_BOUND * bound:.1e}, {HALF_BOUND:g} times the difference of Hugging Face's log-probs in bf16)",
        distance <= HALF_BOUND * bound,
    )


def _exported(info: ModelInfo, directory: Path, ranks: str) -> tuple[str, bool]:
    """Return (text, ok): how many exported tensors differ from the model's, and whether all are equal bit for bit."""
    import torch
    from safetensors import safe_open

    found = stored_tensors(directory, weight_files(directory))
    unequal = []
    for name, tensor in found.items():
        if name not in info.tensors:
            unequal.append(name)
            continue
        with safe_open(info.tensors[name].file, "pt") as before, safe_open(tensor.file, "pt") as after:
            source = before.get_tensor(name)
            if not torch.equal(after.get_tensor(name).to(source.dtype), source):
                unequal.append(name)
    rest = len(info.tensors.keys() - found.keys())
    text = f"export on {ranks}: {len(found)} tensors, {len(unequal)} differ"
    text += f" ({', '.join(unequal[:3])})" if unequal else ""
    return text + (f"; {rest} tensors of the model are not exported" if rest else ""), not unequal
