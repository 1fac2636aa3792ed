"""docs/metrics.md lists exactly the metrics that the code can write."""

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from tracking_assets import experience

from roll_opd.config.plan import ObjectivePlan, SamplingPlan
from roll_opd.extras.games.workflows.environment_workflow import EnvironmentWorkflow, ModelTurn, Trajectory
from roll_opd.objective.columns import with_total_advantages
from roll_opd.objective.corrections import train_infer_metrics
from roll_opd.objective.filters import mask_metrics, masked
from roll_opd.samples.sample import Sample, changed
from roll_opd.tracking.phase_clock import PhaseClock, time_metrics
from roll_opd.tracking.reward_metrics import reward_metrics, scoring_metrics
from roll_opd.tracking.sample_metrics import advantage_metrics, log_ratio_metrics, opd_metrics
from roll_opd.tracking.validation_metrics import validation_metrics
from roll_opd.workers.critic import value_metrics
from roll_opd.workflows import Experience

ROOT = Path(__file__).parents[2]
GROUPS = "actor|critic|data|system|opd|reward|sft|dpo|tokens|rollout|time|val|val_correct|workflow"
STEM = re.compile(rf"({GROUPS})/[\w/@*]+")
MASKS = ("max_len_mask", "difficulty_mask", "error_max_len_clip")
ANY = "*"  # of an f-string's {value}


def expanded(name: str) -> list[str]:
    """`a/{b,c}` -> `a/b`, `a/c`."""
    parts = [part.split(",") for part in re.split(r"\{([^}]*)\}", name)]
    return ["".join(chosen) for chosen in product(*parts)]


def page() -> dict[str, re.Pattern[str]]:
    """Return entry -> pattern of metric names."""
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    entries = [entry for name in re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE) for entry in expanded(name)]
    assert len(entries) == len(set(entries))
    patterns = {}
    for entry in entries:
        pattern = re.sub(r"<\w+>", r"[^/]+", re.escape(entry).replace(r"\<", "<").replace(r"\>", ">"))
        patterns[entry] = re.compile(re.sub(r"@[kj]$", r"@(\\d+|\\*)", pattern))
    return patterns


def unscored(sample: Sample) -> dict[str, np.ndarray]:
    """Return the columns of a sample that the inference engine alone has filled."""
    return {name: sample.columns[name] for name in ("action_mask", "rollout_logprobs")}


def emitted() -> set[str]:
    """The names of real rows: all there is to measure, and as little as possible."""
    batch = [experience(number) for number in range(8)]
    bare = [changed(item, columns=unscored(item), reward=None) for item in batch]
    advantages = advantage_metrics(with_total_advantages(bare, [], ObjectivePlan()), ObjectivePlan())
    valued = [item.with_columns(values=item.old_logprobs, returns=item.old_logprobs * 2.0) for item in batch]
    rows = [
        value_metrics(valued),
        opd_metrics(batch),
        log_ratio_metrics(batch),
        opd_metrics(bare),
        opd_metrics([e.with_columns(action_mask=np.arange(len(e.action_mask)) > 0) for e in batch]),
        reward_metrics([replace(e, reward_parts={"format": 1.0}, reward_reason="wrong answer") for e in batch]),
        reward_metrics([replace(e, reward=None, excluded=True) for e in batch]),
        scoring_metrics("math", {"http_500": 2}, [0.1], [0, 3], 1),
        scoring_metrics("math", {}, [], [], 0),
        train_infer_metrics(batch),
        train_infer_metrics(bare),
        advantages,
        mask_metrics(masked(batch, ObjectivePlan(**dict.fromkeys(MASKS, True)), SamplingPlan(n=4))),
        game_metrics(),
        validation_metrics(batch, 4),
        validation_metrics(bare, 1),
        validation_metrics([replace(e, reward=0.5) for e in batch], 1),
    ]
    return {name for row in [*rows, time_metrics(PhaseClock().lap())] for name in row}


def game_metrics() -> dict[str, float]:
    """Of a trajectory of one turn."""
    workflow = EnvironmentWorkflow.__new__(EnvironmentWorkflow)
    workflow.tag = "lake"
    turn = ModelTurn("", {"metrics": {"action_is_valid": True, "depth": 3}}, response=Experience(tokens=[1, 2]))
    return workflow._metrics(Trajectory([turn]), 0.5, 0.5)


def written(path: Path) -> Iterator[str]:
    """Return the texts of a source file that look like metrics or prefixes of metrics; `*` replaces inserted values."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else ANY for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
        else:
            continue
        if STEM.fullmatch(text):
            yield text.partition("@")[0] if text.endswith(("@sum", "@mean", "@max", "@min")) else text


def sources() -> set[str]:
    rooms = ("pipelines", "rollout", "objective", "teachers", "tracking", "workers")
    return {name for room in rooms for path in (ROOT / "roll_opd" / room).rglob("*.py") for name in written(path)}


def is_listed(name: str, entries: dict[str, re.Pattern[str]]) -> bool:
    if any(pattern.fullmatch(name) for pattern in entries.values()):
        return True
    stem = name.rstrip("/") + "/"  # of `statistics("opd/reverse_kl", ...)`, or of f"time/{phase}"
    return any(re.sub(r"<\w+>", ANY, entry).startswith(stem.removesuffix(f"{ANY}/")) for entry in entries)


def test_every_metric_is_on_the_page() -> None:
    entries = page()
    assert len(entries) > 50
    names = emitted()
    assert {"val_correct/all/pass@2", "opd/teacher/two/reverse_kl/mean", "time/step"} <= names
    assert [name for name in sorted(names) if not any(p.fullmatch(name) for p in entries.values())] == []


def test_every_name_in_the_sources_is_on_the_page() -> None:
    entries, names = page(), sources()
    assert {"actor/lr", "critic/kl", "val_correct/teacher/*", "time/startup"} <= names
    assert [name for name in sorted(names) if not is_listed(name, entries)] == []


def test_the_page_has_no_metric_that_nothing_writes() -> None:
    real, named = emitted(), sources()
    stale = [entry for entry, pattern in page().items() if not any(pattern.fullmatch(name) for name in (*real, *named))]
    assert stale == []


@pytest.mark.parametrize("name", ["opd/nothing", "actor/pg_losses", "val_correct/math/pass@x", "time/"])
def test_a_metric_that_is_not_on_the_page_is_noticed(name: str) -> None:
    assert not any(pattern.fullmatch(name) for pattern in page().values())
