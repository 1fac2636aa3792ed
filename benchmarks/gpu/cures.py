"""Predicted seconds of changes that have not run on a GPU: faster kernels in an update and a scoring pass, and the
larger loop.

    python benchmarks/gpu/cures.py [--student 0.6B] [--teachers 1.7B 4B] [--json OUT]

The first table is computed from kernel times on an H100 (`RECORD`), the second from FLOPs and bytes at the rates of
the same card.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path += [str(HERE.parent), str(HERE.parents[1])]

from predicted import H100, HALF, SINGLE, embeddings, matrices  # noqa: E402
from shapes import SHAPES, Shape  # noqa: E402
from work import TRAINED, keys_seen  # noqa: E402

RECORD = HERE.parent / "results/gpu/2026-11-26_h100_fast_paths/speed_1.7B.json"
# speed-up of FlashAttention 3 over 2 on an H100: 1.5 to 2.0 forward, 1.5 to 1.75 backward (arXiv 2407.08608)
FLASH3_FORWARD, FLASH3_BACKWARD = 1.75, 1.6
TO_HOST, TO_DEVICE = 54e9, 49e9  # bytes per second of pinned memory, measured on an H100
PINNING = 0.62 / 2**30  # seconds per byte, once
TRAIN_SHARE, SCORE_SHARE = 0.49, 0.56  # fractions of the product rate, measured with the 1.7 B shape on an H100
SYNC_SECONDS = 0.1  # seconds of a weight sync without its copy, measured with the demo on an H100
ADAMW_STATE = 3 * SINGLE  # bytes per parameter: f32 weight and two moments


@dataclass(frozen=True)
class Cure:
    """A part of a pass, its measured seconds and the predicted seconds with a cure."""

    work: str
    cure: str
    measured: float
    predicted: float
    whole: float  # measured seconds of the pass

    @property
    def saved(self) -> float:
        """Predicted share of the pass that the cure saves."""
        return (self.measured - self.predicted) / self.whole


def cures(record: Mapping[str, Any]) -> list[Cure]:
    """Return the cures of the passes in a record of `kernel_profile.py`."""
    found = []
    for work, every in record["passes"].items():
        one = every["profile"]
        families = {name: values["seconds"] for name, values in one["families"].items()}
        forward, backward = (_kernels(one, f"flash_{way}") for way in ("fwd", "bwd"))
        flash3 = families["attention"] - forward * (1 - 1 / FLASH3_FORWARD) - backward * (1 - 1 / FLASH3_BACKWARD)
        parts = [
            ("flash attention 3", families["attention"], flash3),
            ("norms at the rate of a copy", families["norm"], one["predicted"]["norm"]),
            ("no idle time between kernels (CUDA graphs), at most", one["seconds"], one["busy_seconds"]),
        ]
        found += [Cure(work, name, before, after, one["seconds"]) for name, before, after in parts]
    return found


def _kernels(profile: Mapping[str, Any], name: str) -> float:
    return sum(seconds for _, kernel, seconds, _ in profile["kernels"] if name in kernel)


def predicted_loop(
    student: Shape, teacher: Shape, *, prompts: int = 64, answers: int = 4, prompt: int = 32, response: int = 1024
) -> dict[str, float]:
    """Return part of a step -> seconds on one H100 with roles that take turns; generation is a lower bound."""
    sequences, length = prompts * answers, prompt + response
    tokens, keys, scored = sequences * length, sequences * keys_seen(0, length), sequences * response
    weights, cached = HALF * _parameters(student), 2 * HALF * student.layers * student.kv_heads * student.head_dim
    read = response * weights + sequences * keys_seen(prompt, length) * cached
    state = weights + ADAMW_STATE * _parameters(student)
    frozen = HALF * _parameters(teacher)
    rate, bandwidth = H100
    return {
        "generate, at least": read / bandwidth,
        "teacher": _forward(teacher, tokens, keys, scored) / (SCORE_SHARE * rate),
        "train": TRAINED * _forward(student, tokens, keys, scored) / (TRAIN_SHARE * rate),
        "weight sync": SYNC_SECONDS + 2 * weights / bandwidth,
        "weight sync, its copy": 2 * weights / bandwidth,
        "student to the host": state / TO_HOST,
        "student to the device": state / TO_DEVICE,
        "student, pinned once": PINNING * state,
        "teacher to the device": frozen / TO_DEVICE,
        "teacher, pinned once": PINNING * frozen,
        "engine asleep, level 1": weights / TO_HOST,
        "engine awake, level 1": weights / TO_DEVICE,
    }


def _parameters(shape: Shape) -> int:
    return matrices(shape) + embeddings(shape)


def _forward(shape: Shape, tokens: float, keys: float, scored: float) -> float:
    attention = 4 * shape.layers * shape.heads * shape.head_dim * keys
    return 2 * matrices(shape) * tokens + attention + 2 * shape.hidden * shape.vocab * scored


def table(found: Sequence[Cure], loops: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return the lines of both tables."""
    lines = [f"{'pass':<9}{'cure':<54}{'measured':>10}{'predicted':>11}{'of the pass':>13}"]
    for one in found:
        times = f"{1e3 * one.measured:>7.0f} ms{1e3 * one.predicted:>8.0f} ms{-one.saved:>13.1%}"
        lines.append(f"{one.work:<9}{one.cure:<54}{times}")
    names = list(loops)
    lines += ["", f"{'predicted seconds of a step':<30}" + "".join(f"{name:>16}" for name in names)]
    for part in loops[names[0]]:
        lines.append(f"{part:<30}" + "".join(f"{loops[name][part]:>16.3f}" for name in names))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print both tables, and write them as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", choices=SHAPES, default="0.6B")
    parser.add_argument("--teachers", nargs="+", choices=SHAPES, default=["1.7B", "4B"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    found = cures(json.loads(RECORD.read_text()))
    loops = {
        f"{options.student}, {name}": predicted_loop(SHAPES[options.student], SHAPES[name]) for name in options.teachers
    }
    print("\n".join(table(found, loops)))
    if options.json:
        text = {"cures": [{**asdict(one), "saved": one.saved} for one in found], "loops": loops}
        options.json.write_text(json.dumps(text, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
