"""Run hooks: what they return is passed on, and a hook that fails is named once and does not fail the run."""

from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_opd.base.failures import ConfigError
from roll_opd.pipelines import run_hooks
from roll_opd.pipelines.run_hooks import RunHook, RunHooks
from roll_opd.tracking.run_directory import RunDirectory
from tests.pages import blocks


class Counting(RunHook):
    """Returns one text for each call."""

    def after_step(self, metrics: Any) -> list[str]:
        return [f"loss {metrics['loss']}"]

    def model_files(self, step: int, *_: Any) -> dict[str, str]:
        return {"STEP": str(step)}

    def at_end(self, ended_by: BaseException | None) -> list[str]:
        return [f"{self.plan.exp_name} ended by {ended_by}"]


class Failing(RunHook):
    """Fails in the second step, while its warnings are read."""

    def after_step(self, metrics: Any) -> Any:
        yield from ["fine"] if metrics["loss"] else [1 / 0]


class NotMade(RunHook):
    """Cannot be made."""

    def __init__(self, *_: Any) -> None:
        raise ValueError("no plan")


def made(monkeypatch: pytest.MonkeyPatch, run: RunDirectory, **values: str) -> RunHooks:
    found = {name: EntryPoint(name, value, "roll_opd.run_hooks") for name, value in values.items()}
    monkeypatch.setattr(run_hooks, "entries", lambda group: found if group == "run_hooks" else {})
    return RunHooks(SimpleNamespace(exp_name="mine"), run)  # type: ignore[arg-type]


def test_hooks_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, "mine")
    names = {"counting": "Counting", "failing": "Failing", "not_made": "NotMade"}
    hooks = made(monkeypatch, run, **{name: f"{__name__}:{value}" for name, value in names.items()})
    assert hooks.after_step({"loss": 1}) == ["loss 1", "fine"]
    assert [hooks.after_step({"loss": 0}) for _ in range(2)] == [["loss 0"]] * 2
    assert hooks.model_files(3, {}, ()) == {"STEP": "3"}
    assert hooks.at_end(RuntimeError("it")) == ["mine ended by it"]
    said = capsys.readouterr().err
    assert said.count("not_made") == 1 and said.count("failing") == 1 and "ZeroDivisionError" in said
    with pytest.raises(ConfigError, match="nowhere"):
        made(monkeypatch, run, absent="nowhere.at_all:Hook")


def test_the_hook_of_the_page() -> None:
    (code,) = [block for block in blocks("extending.md", "python") if "RunHook" in block]
    names: dict[str, Any] = {}
    exec(code, names)
    hook = names["Slow"](None, None)
    assert [len([*hook.after_step({"time/step": seconds})]) for seconds in (601.0, 600.0, None)] == [1, 0, 0]
