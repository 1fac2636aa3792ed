"""Seconds per step from the rates of a card, against loops over tokens, layers and choices of experts."""

import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from roll_opd.base.hardware import CARDS
from roll_opd.commands.main import main
from roll_opd.extras.advice.card_estimate import Rates, generation_seconds, rates, read_bytes
from roll_opd.models.model_info import ModelInfo, read_model

MODELS = Path(__file__).parents[3] / "examples/demo/models"
HALF = [f"{role}.model_args.dtype=bf16" for role in ("student_train", "student_infer", "teacher")]
SHARES = (0.4, 0.6)


def layer_passes(info: ModelInfo, position: int) -> Iterator[float]:
    """Yield the FLOPs of one token in each matrix product of a dense model with grouped queries, without its head."""
    query, key = info.heads * info.head_dim, info.kv_heads * info.head_dim
    for _ in range(info.layers):
        yield from (2 * info.hidden * columns for columns in (query, key, key, query))
        yield from (2 * info.hidden * info.intermediate for _ in range(3))
        yield from (2 * query for _ in range(position + 1) for _ in ("scores", "sum of values"))


def naive_sequence(info: ModelInfo, first: int, end: int, predicted: int) -> float:
    layers = sum(flops for position in range(first, end) for flops in layer_passes(info, position))
    return layers + predicted * 2 * info.hidden * info.vocab


def test_generation_is_that_of_a_loop_over_rounds_and_tokens() -> None:
    """Rates on both sides of the roof; 10 answers to prompts of 7 tokens, four at a time: 4, 4 and 2 run together."""
    info, size, prompt, new = read_model(MODELS / "student"), 2, 7, 5
    assert info.tied and info.windows == () and not info.experts
    for at in (Rates(1e12, 1e6), Rates(1e6, 1e12)):
        found = generation_seconds(info, size, at, 1, answers=10, runs=5, slots=4, prompt=prompt, new=new)
        prefill = 2 * naive_sequence(info, 0, prompt, 1) / at.flops
        weights = size * info.parameters
        assert found["generate: prefill"] == pytest.approx(max(prefill, weights / at.bandwidth))
        decode = 0.0
        for running in (4, 4, 2):
            flops = moved = 0.0
            for position in range(prompt, prompt + new - 1):
                cache = 2 * info.layers * info.kv_heads * info.head_dim * size * (position + 1)
                flops += running * naive_sequence(info, position, position + 1, 1)
                moved += weights + running * cache
            decode += max(flops / at.flops, moved / at.bandwidth)
        assert found["generate: decode"] == pytest.approx(decode)


def test_a_pass_reads_the_experts_that_its_tokens_choose() -> None:
    """The mean over all choices of two of four experts by each of three tokens."""
    dense = read_model(MODELS / "student")
    fields = {"experts": 4, "experts_per_token": 2, "expert_intermediate": 8, "has_experts": (True,) * dense.layers}
    info = replace(dense, **fields)
    choices = list(itertools.product(itertools.combinations(range(4), 2), repeat=3))
    distinct = sum(len({*a, *b, *c}) for a, b, c in choices) / len(choices)
    unread = info.layers * (4 - distinct) * 3 * info.hidden * 8
    assert read_bytes(info, 2, 3) == pytest.approx(2 * (info.parameters - unread))
    assert read_bytes(replace(dense, tied=False), 2, 3) == 2 * (dense.parameters - dense.vocab * dense.hidden)


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", "examples/demo/onpolicy_distill.yaml", *words])
    printed = capsys.readouterr()
    return code, printed.out, " ".join(printed.err.split())


def test_plan_estimates_each_part_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    """The demo in bf16: 256 sequences, and every role on two devices."""
    code, text, _ = planned(capsys, *HALF, "--card", "H100", "--costs", "weight_sync=0.5", "--json")
    plan = json.loads(text)
    parts, costs, batch = plan["schedule"]["estimate"]["parts"], plan["schedule"]["costs"], plan["batch"]
    answers, prompt, new = (batch[key] for key in ("sequences_per_step", "prompt_length", "max_new_tokens"))
    flops, bandwidth = (2 * share * peak for share, peak in zip(SHARES, (989e12, 3.35e12), strict=True))
    for part, role, model, passes in (("teacher", "teacher", "teacher", 1), ("train", "student_train", "student", 3)):
        info = read_model(MODELS / model)
        computed = answers * naive_sequence(info, 0, prompt + new, new) / flops
        read = 2 * 2 * info.parameters / bandwidth  # both replicas read two bytes per weight
        assert parts[part][role] == pytest.approx(passes * max(computed, read))
        assert costs[part] == parts[part][role]
    assert (
        code == 0 and costs["weight_sync"] == 0.5 and math.isclose(costs["generate"], sum(parts["generate"].values()))
    )
    text = " ".join(planned(capsys, *HALF, "--card", "H100")[1].split())
    assert "estimated from stated rates of H100 (40% of peak FLOP/s, 60% of bandwidth), not measured" in text


@pytest.mark.extras
def test_estimates_without_a_basis_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words, named in (
        ([*HALF, "--card", "H101"], tuple(CARDS)),
        ([*HALF, "--card", ""], tuple(CARDS)),
        (["--card", "H100"], ("student_train", "teacher", "dtype")),
        ([*HALF, "--card", "H100", "--measured", "run"], ("--card", "--measured")),
        ([*HALF, "--card", "H100", "workflow=simple_workflow", "prompt_key=messages"], ("--card", "--costs")),
    ):
        code, text, error = planned(capsys, *words)
        assert code == 2 and not text and all(name in error for name in named), (words, error)
    assert rates(CARDS["L40S"], 3).seconds(3 * 362e12, 0) == pytest.approx(1 / SHARES[0])
