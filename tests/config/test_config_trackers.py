"""`track_with` and `tracker_kwargs`: ROLL's form, several trackers, missing packages, hidden secrets."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_opd.base.registry import arguments
from roll_opd.config.plan import RunPlan
from roll_opd.planner.tracker_sections import GIVEN_BY_US
from roll_opd.tracking.secrets import without_secrets
from roll_opd.tracking.tracker_registry import TRACKERS, lacking

Plan = Callable[..., RunPlan]

WANDB = {"project": "p", "name": "n", "notes": None, "tags": ["a", "b"], "api_key": "secret-1", "log_dir": "logs"}
SWANLAB = {"login_kwargs": {"api_key": "secret-2"}, "project": "p", "logdir": "logs", "mode": "cloud", "tags": "one"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"tensorboard": {}}),
        ({"track_with": "stdout"}, {"stdout": {}}),
        ({"tracker_kwargs": {"log_dir": "tb"}}, {"tensorboard": {"log_dir": "tb"}}),
        ({"track_with": ["stdout", "tensorboard"], "tracker_kwargs": {"log_dir": "tb"}}, ...),
        (
            {"track_with": "wandb", "tracker_kwargs": WANDB},
            {"wandb": {key: tuple(v) if key == "tags" else v for key, v in WANDB.items() if v is not None}},
        ),
        ({"track_with": "swanlab", "tracker_kwargs": SWANLAB}, {"swanlab": SWANLAB}),
        (
            {
                "track_with": ["wandb", "mlflow", "jsonl"],
                "tracker_kwargs": {"wandb": {"project": "p"}, "mlflow": {"tags": {"a": "b"}}},
            },
            {"wandb": {"project": "p"}, "mlflow": {"tags": {"a": "b"}}, "jsonl": {}},
        ),
        ({"track_with": "yaml.Loader", "tracker_kwargs": {"any": 3}}, {"yaml.Loader": {"any": 3}}),
        (
            {"track_with": ["stdout", "yaml.Loader"], "tracker_kwargs": {"yaml.Loader": {"any": [1]}}},
            {"stdout": {}, "yaml.Loader": {"any": (1,)}},
        ),
    ],
)
def test_every_form_of_naming_trackers_is_read(plan: Plan, changes: dict[str, Any], expected: Any) -> None:
    run = plan(changes, runnable=False)
    if expected is ...:
        expected = {"stdout": {}, "tensorboard": {"log_dir": "tb"}}
    assert run.tracker_args == expected
    assert run.trackers == tuple(expected)


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"track_with": "stdout", "tracker_kwargs": {"log_dir": "x"}}, "tracker_kwargs has no effect: stdout takes no"),
        (
            {"track_with": "stdout", "tracker_kwargs": {"wandb": {"project": "p"}}},
            "tracker_kwargs.wandb has no effect: track_with does not name wandb",
        ),
    ],
)
def test_arguments_of_trackers_that_do_not_run_give_a_warning(
    plan: Plan, changes: dict[str, Any], warning: str
) -> None:
    run = plan(changes)
    assert [text for text in run.warnings if warning in text]
    assert run.tracker_args == {"stdout": {}}


def test_a_missing_package_stops_a_run_and_not_a_plan(
    plan: Plan, problems: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [name for name in TRACKERS.builtin if TRACKERS.facts(name).packages]
    for name in names:
        for module in TRACKERS.facts(name).packages:
            monkeypatch.setitem(sys.modules, module, None)  # as good as not installed
    changes = {"track_with": names}
    reported = problems(changes)
    assert len(reported) == len(names) == 4
    for name, text in zip(names, reported, strict=True):
        assert f"{name} needs" in text and f"pip install 'roll_opd[{name}]'" in text
    run = plan(changes, runnable=False)
    assert [text for text in run.warnings if "pip install" in text] == reported


def test_what_is_installed_is_not_lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_tracker.py").write_text("raise RuntimeError('planning imports nothing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert lacking(["tensorboard", "stdout", "jsonl", "my_own_tracker.Tracker"]) == []


def test_secrets_are_neither_written_nor_sent(plan: Plan) -> None:
    run = plan(
        {"track_with": ["wandb", "swanlab"], "tracker_kwargs": {"wandb": WANDB, "swanlab": SWANLAB}}, runnable=False
    )
    assert "secret-" not in run.config_yaml
    assert yaml.safe_load(run.config_yaml)["tracker_kwargs"]["wandb"]["project"] == "p"
    assert run.tracker_args["wandb"]["api_key"] == "secret-1"
    assert run.tracker_args["swanlab"]["login_kwargs"] == {"api_key": "secret-2"}


def test_secrets_under_any_key_are_left_out() -> None:
    values = {
        "system_envs": {"HF_TOKEN": "s1", "WANDB_API_KEY": "s2", "NCCL_DEBUG": "INFO"},
        "rewards": [{"client_secret": "s3", "max_tokens": 5, "max_tokens_in_token_batch": 9}, "s1", "INFO"],
        "copy": "s4",
        "db": {"Password": "s4", "tokens": 1, "tokenizer": "t", "token": {"read": "s5"}},
        "deep": [["s5", None]],
        "number": 7,
    }
    assert without_secrets(values) == {
        "system_envs": {"NCCL_DEBUG": "INFO"},
        "rewards": [{"max_tokens": 5, "max_tokens_in_token_batch": 9}, "INFO"],
        "db": {"tokens": 1, "tokenizer": "t"},
        "deep": [[None]],
        "number": 7,
    }


def test_the_page_lists_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "trackers.md").read_text(encoding="utf-8")
    for name in TRACKERS.builtin:
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
        taken = arguments(TRACKERS.find(name), GIVEN_BY_US)
        assert [key for key in taken if f"`{key}`" not in row] == []
