"""The planned memory of a rank against its allocated bytes after an update."""

import megatron_layouts as layouts
import pytest
from megatron_answers import Answers
from megatron_jobs import loading, training
from megatron_registry import assemble_jobs

from roll_opd.megatron.deterministic_ops import VECTOR
from roll_opd.models.memory import PADDED_TO
from tests.cover import cover, tiered

KINDS = ("train-", "half-", "experts-", "experts-deepseek", "replay-", "lora-")
ASSEMBLED = assemble_jobs()
JOBS = [name for name in ASSEMBLED if name.startswith(KINDS)]
PARTS = ("weights", "gradients", "optimizer")
PIECE = 8192  # bytes by which Megatron pads gradients, a bucket


def varied(job: str) -> tuple:
    """The cases that tests with jobs of this kind cover."""
    settings = ASSEMBLED[job]
    varied = (settings.get(key) for key in ("model", "distributed", "tokens", "targets"))
    return (*layouts.axes(settings["layout"]), *varied)


@pytest.mark.parametrize("kind", tiered(KINDS, ["train-", "half-", "experts-", "lora-"]))
@pytest.mark.parametrize("part", PARTS)
def test_a_rank_holds_what_was_planned(answers: Answers, kind: str, part: str) -> None:
    """F32 and bf16, with and without adapters; of each kind but bf16, layouts with every size of a dimension."""
    own = [job for job in JOBS if job.startswith(kind) and not ASSEMBLED[job].get("load")]
    pushed = [f"half-{layout}" for layout in training.HALF_PUSHED] if kind == "half-" else cover(own, of=varied)
    for job in pushed:
        assert_as_planned(answers, job, part)


@pytest.mark.nightly
@pytest.mark.parametrize("job", JOBS)
def test_a_rank_holds_what_was_planned_in_every_layout(answers: Answers, job: str) -> None:
    for part in PARTS:
        assert_as_planned(answers, job, part)


def assert_as_planned(answers: Answers, job: str, part: str) -> None:
    for rank in range(layouts.LAYOUTS[answers.jobs[job]["layout"]].world_size):
        held, planned = answers.values(f"{job}-held-{rank}")[part]
        assert held == pytest.approx(planned, rel=0.05, abs=PIECE), (job, rank)


@pytest.mark.parametrize(("model", "layout"), loading.LOADED)
def test_loading_takes_little_more_than_the_ranks_own_part(answers: Answers, model: str, layout: str) -> None:
    for rank in range(2):
        peak, share = answers.values(f"loading-{model}-{layout}-{rank}")
        assert 48 * 2**20 < share <= peak < 1.3 * share


@pytest.mark.parametrize("process", range(4))
def test_groups_share_one_thread_for_connections_that_lets_others_go_first(answers: Answers, process: int) -> None:
    """After all jobs, each with separate groups."""
    assert answers.values(f"priorities-{process}") == [10]


def test_the_vocabulary_is_padded_as_the_engine_pads_it() -> None:
    assert PADDED_TO == VECTOR
