"""The search path of a configuration, its composition, and groups on the command line."""

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from config_assets import set_key, write_config
from omegaconf import OmegaConf

from roll_opd.base.failures import ConfigError
from roll_opd.config.compose import load_config, parse_overrides
from roll_opd.config.plan import Layout, RunPlan

Plan = Callable[..., RunPlan]
TRAIN = "student_train.strategy_args.strategy_config"


def _yaml(path: Path, values: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(values), path)
    return path


def _refused(*arguments: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(*arguments)
    (problem,) = caught.value.problems
    return problem


def test_a_directory_without_the_file_hides_no_other(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first directory with the file counts: the current directory, its examples/, the directory of the script."""
    project, scripts = root / "project", root / "scripts"
    (project / "mine").mkdir(parents=True)
    monkeypatch.chdir(project)
    monkeypatch.setattr(sys, "argv", [str(scripts / "start.py")])
    for place in (scripts / "mine", project / "examples" / "mine", project / "mine"):
        _yaml(place / "run.yaml", {"seed": 1})
        assert load_config("mine", "run", []).directory == place
    reported = _refused("mine", "other", [])
    for place in (project / "mine", project / "examples" / "mine", scripts / "mine"):
        assert str(place) in reported
    assert reported.endswith("YAML files there: run.yaml")
    reported = _refused("nowhere", "run", [])
    for place in (project, project / "examples", scripts):
        assert str(place / "nowhere") in reported
    (project / "mine" / "c.yaml").mkdir()
    assert "c.yaml is a directory" in _refused("mine", "c", [])


@pytest.mark.parametrize("given", ["yaml", "command line"])
def test_a_search_path_of_ones_own_is_kept(root: Path, given: str) -> None:
    """This package's path follows it, so a group in both is the user's."""
    theirs = root / "site configs"
    _yaml(theirs / "mygroup" / "a.yaml", {"seed": 7})
    _yaml(theirs / "parallel" / "tp2.yaml", {"tensor_model_parallel_size": 4})
    defaults = ["mygroup@_global_: a", "parallel@x: tp2", "parallel@y: pp2"]
    values: dict[str, Any] = {"defaults": [*map(lambda text: dict([text.split(": ")]), defaults), "_self_"]}
    overrides = []
    if given == "yaml":
        values["hydra"] = {"searchpath": [f"file://{theirs}"]}
    else:
        overrides = [f"hydra.searchpath={json.dumps([f'file://{theirs}'])}"]
    _yaml(root / "run.yaml", values)
    loaded = load_config(str(root), "run", overrides)
    assert loaded.values["seed"] == 7
    assert loaded.origins["seed"] == "mygroup/a.yaml:1"
    assert (loaded.values["x"], loaded.values["y"]["pipeline_model_parallel_size"]) == (
        {"tensor_model_parallel_size": 4},
        2,
    )


def test_a_search_path_that_leads_nowhere_is_named_where_it_matters(root: Path) -> None:
    values = {"hydra": {"searchpath": [f"file://{root}/no"]}, "defaults": [{"mygroup": "a"}]}
    _yaml(root / "run.yaml", values)
    reported = _refused(str(root), "run", [])
    assert "mygroup/a" in reported
    assert f"missing directories in hydra.searchpath: {root}/no" in reported
    _yaml(root / "run.yaml", {"hydra": {"searchpath": "here"}, "seed": 1})
    assert "must be a list" in _refused(str(root), "run", [])


@pytest.mark.parametrize("sign", ["", "+"])
def test_a_group_goes_where_it_is_put_whether_a_defaults_list_has_it_or_not(plan: Plan, sign: str) -> None:
    run = plan(overrides=(f"{sign}parallel@{TRAIN}=tp2", f"{sign}trackers=stdout"))
    assert run.student.layout == Layout(tp=2, dp=1)
    assert run.trackers == ("stdout",)
    chosen = {"defaults": [{f"parallel@{TRAIN}": "single"}, {"trackers": "tensorboard"}, "_self_"]}
    run = plan(chosen, overrides=(f"{sign}parallel@{TRAIN}=tp2", f"{sign}trackers=stdout"))
    assert (run.student.layout, run.trackers) == (Layout(tp=2, dp=1), ("stdout",))


def test_a_group_of_a_role_wants_the_role_said_and_the_advice_works(
    root: Path, values: dict[str, Any], plan: Plan
) -> None:
    place = write_config(root, values)
    for override, advice in (
        ("parallel=tp2", f"parallel@{TRAIN}=tp2"),
        ("+parallel=tp2", f"parallel@{TRAIN}=tp2"),
        ("rollout=cpu", "rollout@student_infer.strategy_args.strategy_config=cpu"),
        ("models=demo_student", "models@student_train.model_args=demo_student"),
    ):
        assert _refused(place, "run", [override]).endswith(f"use {advice}")
        assert load_config(place, "run", [advice]).values
    assert plan(overrides=(f"parallel@{TRAIN}=tp2",)).student.layout.tp == 2
    set_key(values, "defaults", [{"parallel@teacher.strategy_args.strategy_config": "single"}, "_self_"])
    reported = _refused(write_config(root, values), "run", ["parallel=tp2"])
    assert reported.endswith("use parallel@teacher.strategy_args.strategy_config=tp2")
    assert "tp3" in _refused(place, "run", [f"parallel@{TRAIN}=tp3"])
    assert "nothing/here is not a group" in _refused(place, "run", ["nothing/here=a"])
    assert load_config(place, "run", ["hydra/launcher=basic"]).values


def test_an_environment_variable_that_is_not_set_is_to_be_set(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    _yaml(root / "run.yaml", {"tracker_kwargs": {"api_key": "${oc.env:NO_SUCH_KEY}"}})
    reported = _refused(str(root), "run", [])
    assert reported.startswith(
        "tracker_kwargs.api_key: the environment variable NO_SUCH_KEY is not set; set it (export"
    )
    assert reported.endswith("(run.yaml:2)")


@pytest.mark.parametrize(
    "value",
    ["/ckpt/step=10@a", "实验", "é=ü", "x y=z", "C:\\x=1", 'say="hi"', "50%=half", "a=b=c", "日本/モデル", "=x"],
)
def test_a_plain_text_needs_no_quotes(value: str) -> None:
    for prefix in ("", "+", "++"):
        (override,) = parse_overrides([f"{prefix}exp_name={value}"])
        assert (override.key_or_group, override.value()) == ("exp_name", value)


@pytest.mark.parametrize("value", ["a, b", "[b=1]", "{b=1}", "range(1,", "'x", "f(x=1)"])
def test_another_text_is_refused_with_the_quotes_to_write(value: str) -> None:
    """If a shell reads the text in the message, the key gets the intended value."""
    with pytest.raises(ConfigError) as refused:
        parse_overrides([f"exp_name={value}"])
    (word,) = shlex.split(refused.value.problems[0].rpartition(": ")[2])
    (override,) = parse_overrides([word])
    assert override.value() == value


@pytest.mark.parametrize("name", ["onpolicy_distill", "hints", "rlvr_opd"])
@pytest.mark.parametrize("choice", ["hydra/launcher=basic", "hydra.run.dir=/nowhere"])
def test_hydras_own_part_changes_no_value(name: str, choice: str) -> None:
    """It is composed only if it is selected or overridden, because composing it takes most of the time."""
    overrides = ["max_steps=7", "+system_envs.A=b"]
    short, whole = (load_config("demo", name, [*overrides, *chosen]) for chosen in ([], [choice]))
    del whole.origins[choice.partition("=")[0]]
    short.origins.pop("hydra.run.dir")
    whole.origins.pop("hydra.run.dir", None)
    assert short == whole
    assert short.values["max_steps"] == 7 and "hydra" not in short.values


def test_defaults_lists_may_choose_files_of_hydras(root: Path) -> None:
    _yaml(root / "run.yaml", {"defaults": [{"override hydra/job_logging": "disabled"}, "_self_"], "seed": 1})
    assert load_config(str(root), "run", []).values == {"seed": 1}


@pytest.mark.parametrize(
    ("section", "problem"),
    [({"outputdir": "x"}, "outputdir"), ({"run": {"dir": ["x"]}}, "to string"), ("x", "HydraConf")],
)
def test_keys_of_hydras_are_checked(root: Path, section: Any, problem: str) -> None:
    _yaml(root / "run.yaml", {"hydra": section, "seed": 1})
    assert problem in _refused(str(root), "run", [])


def test_a_key_for_a_text_takes_an_override_as_written(plan: Plan) -> None:
    """Hydra reads 1e3 as a number; the name of a run is the text."""
    for text in ("1e3", "007", "true", "1_000", "-3", "1.50"):
        assert plan({}, (f"exp_name={text}",)).exp_name == text, text
    assert plan({}, ("exp_name='1e3'", "seed=7")).seed == 7
    with pytest.raises(ConfigError):
        plan({}, ("seed=true",))
