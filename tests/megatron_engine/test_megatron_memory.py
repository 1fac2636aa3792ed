"""What the plan says of a rank's memory, against the bytes that it holds after an update."""

import json

import megatron_cases as cases
import pytest
from megatron_answers import Answers

from roll_opd.megatron.deterministic_ops import VECTOR
from roll_opd.models.memory import PADDED_TO

KINDS = ("train-", "half-", "experts-", "experts-deepseek", "replay-", "lora-")
PIECE = 8192  # bytes by which Megatron pads gradients, a bucket


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", ["weights", "gradients", "optimizer"])
def test_a_rank_holds_what_was_planned(answers: Answers, kind: str, part: str) -> None:
    """In every layout, f32 and bf16, with and without adapters."""
    share = 0.05
    files = sorted(answers.root.glob(f"{kind}*-held-*.json"))
    assert files
    for file in files:
        held, planned = json.loads(file.read_text())[part]
        assert held == pytest.approx(planned, rel=share, abs=PIECE), file.stem


@pytest.mark.parametrize(("model", "layout"), cases.LOADED)
def test_loading_takes_little_more_than_the_ranks_own_part(answers: Answers, model: str, layout: str) -> None:
    for rank in range(2):
        peak, share = json.loads((answers.root / f"loading-{model}-{layout}-{rank}.json").read_text())
        assert 48 * 2**20 < share <= peak < 1.3 * share


@pytest.mark.parametrize("process", range(4))
def test_groups_share_one_thread_for_connections_that_lets_others_go_first(answers: Answers, process: int) -> None:
    """After all jobs, each of which had groups of its own."""
    assert json.loads((answers.root / f"priorities-{process}.json").read_text()) == [10]


def test_the_vocabulary_is_padded_as_the_engine_pads_it() -> None:
    assert PADDED_TO == VECTOR
