"""`roll-opd` on the command line: commands, the pages that show them, and projects of examples."""

import argparse
import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import roll_opd
from roll_opd.base import command_line
from roll_opd.base.command_line import configuration, pipeline_arguments
from roll_opd.base.failures import ConfigError
from roll_opd.commands import init_project, main, python_api
from roll_opd.pipelines.run_pipeline import Run
from roll_opd.planner.load_plan import load_plan
from tests.pages import blocks, commands

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def ask(*words: str) -> tuple:
    """Return the pipeline and the configuration that `roll-opd run` reads from its arguments."""
    parsed = main.parse(["run", *words])
    return pipeline_arguments(parsed), *configuration(parsed)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("distill a.yaml", ({"pure": True}, ".", "a.yaml", [])),
        ("rlvr x/a.yaml b=1 ~c", ({"pure": False}, "x", "a.yaml", ["b=1", "~c"])),
        ("sft --config_path x --config_name a b=1", ({"pipeline": "sft"}, "x", "a", ["b=1"])),
        ("distill b=1 --config_path x c=2 --config_name a d=3", ({"pure": True}, "x", "a", ["b=1", "c=2", "d=3"])),
        ("--config_path x --config_name a dpo b=1", ({"pipeline": "dpo"}, "x", "a", ["b=1"])),
        ("my.pipelines b=1 /x/a.yaml", ({"pipeline": "my.pipelines"}, "/x", "a.yaml", ["b=1"])),
        ("a.yaml", ({}, ".", "a.yaml", [])),
        ("b=1 --config_path x --config_name a", ({}, "x", "a", ["b=1"])),
        ("~b a.yaml c=d.yaml", ({}, ".", "a.yaml", ["~b", "c=d.yaml"])),
    ],
)
def test_subcommands_and_options_are_read_from_the_words(words: str, asked: tuple) -> None:
    assert ask(*words.split()) == asked


@pytest.mark.extras
def test_every_pipeline_is_named(tmp_path: Path) -> None:
    names = ["distill", "rlvr", "agentic", "sft", "dpo", "offline_distill"]
    command_line.add_config_arguments(parser := argparse.ArgumentParser())
    assert parser.usage.count(f"[{'|'.join(names)}|MODULE]") == 2
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `PIPELINE` |")]
    assert [name for name in names if f"`{name}`" not in row] == []
    (tmp_path / "a.yaml").write_text("max_steps: 1\n")
    with pytest.raises(ConfigError, match=f"no pipeline 'none'; known: {', '.join(names)}"):
        load_plan(str(tmp_path), "a", pipeline="none")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "no configuration given; give a YAML file, or --config_path DIR --config_name NAME"),
        ("distill b=1", "no configuration given"),
        ("distill --config_path x", "--config_path alone"),
        ("distill --config_name a", "--config_name alone"),
        ("a.yaml b.yaml", "a.yaml and b.yaml are 2 configurations"),
        ("distill a.yaml --config_path x", "a.yaml and --config_path both"),
    ],
)
def test_words_that_name_no_configuration(words: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ask(*words.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("distill run", "no configuration given: 'run' is not a .yaml file; write run.yaml"),
        ("run", "no configuration given: 'run' is not a .yaml file; write run.yaml"),
        ("distill b=1 there/other", "'there/other' is not a .yaml file; write there/other.yml"),
        ("distill there/rows.jsonl", "'there/rows.jsonl' is not a .yaml file; give a YAML file, or --config_path"),
        ("there/rows.jsonl", "'there/rows.jsonl' is not a .yaml file; give a YAML file, or --config_path"),
        ("distill none ~b", "'none' is not a .yaml file; give a YAML file, or --config_path"),
        ("distill ~b +c=1", "no configuration given; give a YAML file"),
    ],
)
def test_a_word_that_is_no_yaml_file_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    for name in ("run.yaml", "there/other.yml", "there/rows.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) as caught:
        ask(*words.split())
    (problem,) = caught.value.problems
    assert said in problem


@pytest.mark.parametrize("configuration", ["dpo.yaml", "--config dpo.yaml", "--config_path . --config_name dpo"])
def test_a_pipeline_may_be_called_as_a_file_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, configuration: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dpo.yaml").touch()
    assert ask("dpo", *configuration.split())[0] == {"pipeline": "dpo"}


def test_a_file_with_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    file = tmp_path / "lr=1" / "run.yaml"
    file.parent.mkdir()
    file.touch()
    assert ask(str(file)) == ({}, str(file.parent), "run.yaml", [])


def test_an_unknown_pipeline_gets_a_list_of_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["plan", "destill", "demo/onpolicy_distill.yaml"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in ("'destill'", "distill,", "rlvr", "sft", "dpo", "dotted path"))


def test_version_prints_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"roll-opd {roll_opd.__version__}\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("-m", "roll_opd", "--version"), 0, roll_opd.__version__),
        # this one imports what a run needs: it answers, and does not end in silence
        (("-m", "roll_opd.commands.run"), 2, "no configuration given"),
    ],
)
def test_the_package_runs_as_a_module(words: tuple[str, ...], code: int, said: str) -> None:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stdout + done.stderr


# projects of examples


def test_the_demo_leads_to_nothing_outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its configurations can be planned from any directory, with models and rows of the demo's directory."""
    there = tmp_path / "my demo"
    assert main.main(["init", str(there), "--example", "demo"]) == 0
    assert {file.name for file in there.glob("*.yaml")} == {file.name for file in DEMO.glob("*.yaml")}
    assert not list(there.rglob("*.py"))
    for file in (there / "data/train.jsonl", there / "models/teacher/model.safetensors"):
        assert file.read_bytes() == (DEMO / file.relative_to(there)).read_bytes()
    for name in ("onpolicy_distill", "ppo", "dpo"):
        for directory, place in ((".", there), (there.name, tmp_path)):
            monkeypatch.chdir(place)
            plan = load_plan(directory, name)
            models = [plan.student.model.path, *(teacher.source.model.path for teacher in plan.teachers)]
            assert plan.validation is not None
            files = [*plan.data.files, *plan.validation.data.files]
            assert all(Path(path).is_relative_to(there) for path in (*models, *files))


def test_each_example_becomes_a_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launcher runs one of its configurations; a project whose models are shipped can be planned as it is."""
    assert {"start", "demo", "games"} < init_project.EXAMPLES.keys()
    for name, example in init_project.EXAMPLES.items():
        there = tmp_path / name
        assert main.main(["init", str(there), "--example", name]) == 0
        launcher = there / "run.sh"
        assert os.access(launcher, os.X_OK) and f" roll-opd run {example.config} " in launcher.read_text()
        texts = [file.read_text(encoding="utf-8") for file in there.rglob("*.yaml")]
        assert not any(path in text for text in texts for path in (f": examples/{name}", "- examples/"))
        if not (there / "models").exists():
            assert (there / example.config).is_file() and name.startswith(("qwen3", "cards"))
            continue
        monkeypatch.chdir(there)
        plan = load_plan(".", example.config)
        assert Path(plan.student.model.path).is_relative_to(there)
    (reward,) = load_plan(str(tmp_path / "start"), "distill").rewards
    assert reward.terms[0].worker == "my_rewards.last_number"
    text = (tmp_path / "start/distill.yaml").read_text(encoding="utf-8")
    assert blocks("your-task.md", "yaml")[0] in text, "the page shows the configuration of the project"


@pytest.mark.parametrize(
    ("prepare", "said"),
    [
        (lambda place: (place.mkdir(), (place / "x").touch()), "is not empty"),
        (lambda place: place.touch(), "Not a directory"),
        (lambda place: place.symlink_to(place), "File exists"),
    ],
)
def test_a_project_that_cannot_be_written(
    prepare: Callable, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare(tmp_path / "d")
    assert main.main(["init", str(tmp_path / "d")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("roll-opd: ") and said in printed.err
    assert main.main(["init", str(tmp_path / "empty/below")]) == 0


# the pages


def test_the_page_names_every_command_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs/cli.md").read_text(encoding="utf-8")
    for name, command in main.commands().items():
        assert f"(#{name})" in page or ("(#run-and-plan)" in page and f"[`{name}`]" in page)
        parser = main.argparse.ArgumentParser()
        command.add_arguments(parser)
        options = {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}
        assert [option for option in options if option not in page] == []
    ends = (Path(__file__).parents[2] / "docs/start-and-end.md").read_text(encoding="utf-8")
    assert all(f"| {code} |" in ends for code in (0, 1, command_line.USER_ERROR, command_line.INTERRUPTED))


@pytest.mark.slow
@pytest.mark.parametrize("pages", [["cli.md"], ["quickstart.md", "bigger-machine.md"]], ids=["cli", "path"])
def test_commands_of_pages(pages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has exit code 0; `run` is only planned. tests/pipelines/test_runs.py executes the quickstart's run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["roll-opd"])
    for command, *words in (each for page in pages for each in commands(page)):
        if command == "cd":
            monkeypatch.chdir(words[0])
            continue
        if command == "python":
            assert words[:2] == ["-m", "roll_opd"]
            words = words[2:]
        if words[0] == "run":
            words[0] = "plan"
        try:
            assert main.main(words) == 0, words
        except SystemExit as ended:  # --help, --version
            assert ended.code == 0, words


def test_rows_of_the_quickstart_are_the_demos() -> None:
    rows = [yaml.safe_load(line) for line in blocks("your-task.md", "json")[0].splitlines()]
    there = [yaml.safe_load(line) for line in (DEMO / "data/train.jsonl").read_text().splitlines()[: len(rows)]]
    assert [row["ground_truth"] for row in rows] == [row["ground_truth"] for row in there]
    assert [row["messages"] for row in rows] == [yaml.safe_load(row["messages"]) for row in there]


def test_the_reward_of_the_page_is_the_projects(tmp_path: Path) -> None:
    spaces: list[dict[str, Any]] = [{}, {}]
    exec(blocks("your-task.md", "python")[0], spaces[0])
    exec((DEMO.parent / "start/my_rewards.py").read_text(), spaces[1])
    samples = [SimpleNamespace(response=text, ground_truth="-5") for text in ("7-12=-5", "-5, so 5", "none")]
    assert [space["last_number"](samples) for space in spaces] == [[1, 0, 0]] * 2


@pytest.mark.slow
def test_python_of_the_quickstart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's arguments of `roll_opd.run` can be planned; tests/pipelines/test_runs.py trains with them."""
    planned = []

    def plan(config: python_api.Config, overrides: python_api.Overrides = ()) -> defaultdict:
        words = [*python_api._configuration(config, tmp_path), *python_api._overrides(overrides)]
        planned.append(main.main(["plan", *words]))
        return defaultdict(str)

    monkeypatch.setattr(python_api, "run", plan)
    main.main(["init", str(tmp_path / "quickstart")])
    monkeypatch.chdir(tmp_path / "quickstart")
    scope: dict[str, Any] = {}
    for text in blocks("quickstart.md", "python")[1:]:
        exec(text, scope)
    assert planned == [0, 0]


def test_a_run_collects_garbage_between_its_steps_and_never_in_one():
    class Sample:
        pass

    run: Any = SimpleNamespace(steps_done=0, plan=SimpleNamespace(max_steps=2))
    dropped: list[weakref.ref] = []
    with command_line.without_collections():
        for _ in Run.steps.fget(run):  # type: ignore[attr-defined]
            assert all(sample() is None for sample in dropped)  # those of the step before
            for _ in range(10 * gc.get_threshold()[0]):
                sample: Any = Sample()
                sample.itself = sample
                dropped.append(weakref.ref(sample))
            assert dropped[-10]() is not None and dropped[-len(dropped) // 2]() is not None
            del sample
    assert gc.isenabled() and dropped[0]() is None
    gc.disable()
    try:
        with command_line.without_collections():
            pass
        assert not gc.isenabled()  # it was somebody else's choice
    finally:
        gc.enable()


def test_names_with_letters_of_other_encodings_are_planned_in_every_locale(tmp_path: Path) -> None:
    """Without Python's own remedies for the C locale, as with an 8-bit locale."""
    shutil.copytree(DEMO, tmp_path / "demo")
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [
        sys.executable,
        "-m",
        "roll_opd",
        "plan",
        "distill",
        "onpolicy_distill.yaml",
        "exp_name=größe 東",
        "--json",
    ]
    done = subprocess.run(command, cwd=tmp_path / "demo", env={**os.environ, **variables}, capture_output=True)
    assert done.returncode == 0 and json.loads(done.stdout)["exp_name"] == "größe 東", done.stderr
