"""Games in a report: correct turns, maps and rewards, and no numbers or colours for observed tokens."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_assets import Page, write_run

from roll_opd.base.failures import RunError, Terminated
from roll_opd.extras.report.page import contents, write_report
from roll_opd.extras.report.run_files import read_run
from roll_opd.pipelines.run_facts import note_end
from roll_opd.tracking.run_directory import METRICS, SAMPLES, VALIDATION_SAMPLES, RunDirectory, read_jsonl, to_json
from roll_opd.tracking.summary import write_summary

TURNS = ("Right.", "\n|S__\n_P_\n__G\n", "Down.", "\n|S__\n___\n_PG\n", "Right.")
RESPONSE = "".join(TURNS)
ACTED = [place % 2 == 0 for place, turn in enumerate(TURNS) for _ in turn]
GAME = {"action_mask": ACTED, "turn_rewards": [0.0, 0.0, 1.0], "prompt": "<|user|>SP_\n___\n__G<|end|>"}
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the program of the page")


def drawn(run: RunDirectory) -> dict[str, Any]:
    report = write_report(run.path)
    called = subprocess.run(
        ["node", str(Path(__file__).with_name("dom.js")), str(report)], capture_output=True, text=True, check=True
    )
    return json.loads(called.stdout)


def poisoned(run: RunDirectory, seed: int = 0) -> None:
    """Give observed tokens the wild log-probs that files of older versions hold there."""
    rng = np.random.default_rng(seed)
    for name in (SAMPLES, VALIDATION_SAMPLES):
        rows = read_jsonl(run.path / name)
        for row in (row for row in rows if len(row["action_mask"]) == len(ACTED)):
            row["action_mask"] = ACTED
            columns = [row, row["teacher_logprobs"]]
            for column in columns:
                for key, values in column.items():
                    if (key.endswith(("logprobs", "teacher")) and isinstance(values, list)) or key == "advantages":
                        wild = rng.choice([-100.0, 100.0], len(values))
                        column[key] = [v if acts else w for v, w, acts in zip(values, wild, ACTED, strict=True)]
            row["teacher_topk_hits"] = {"teacher": [acts or bool(rng.random() < 0.5) for acts in ACTED]}
        (run.path / name).write_text("".join(to_json(row) + "\n" for row in rows))


def test_turns_rewards_and_means_are_of_actions(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", response=RESPONSE, **GAME)
    data = Page(write_report(run.path).read_text()).data
    for shown, row in zip(data["samples"], read_jsonl(run.path / SAMPLES), strict=True):
        acts = [[begin, kind, number] for begin, kind, number in shown["turns"]]
        begins = np.cumsum([0, *map(len, TURNS)])[:-1].tolist()
        assert acts == [[begin, place % 2 == 0, place // 2 + 1] for place, begin in enumerate(begins)]
        assert shown["turn_rewards"] == [0, 0, 1] and shown["acted"] == sum(ACTED)
        assert shown["observed"] == [place for place, acts in enumerate(ACTED) if not acts]
        for name, values in shown["values"].items():
            assert [value is not None for value in values] == ACTED, name
        gaps = [s - t for s, t in zip(row["student_logprobs"], row["teacher_logprobs"]["teacher"], strict=True)]
        values = shown["values"]
        means = [s - t for s, t in zip(values["student"], values["teacher/teacher"], strict=True) if s is not None]
        assert np.mean(means) == pytest.approx(np.mean(np.array(gaps)[ACTED]), abs=1e-3)
    assert data["agreement"][0]["tokens"] == 4 * sum(ACTED)


def test_files_of_older_versions_count_actions_too(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(number) / "run", response=RESPONSE, **GAME) for number in range(2)]
    for seed, run in enumerate(runs):
        poisoned(run, seed)
    first, second = (
        {k: v for k, v in contents(read_run(run.path)).items() if k not in ("made", "facts")} for run in runs
    )
    assert first == second and first["agreement"][0]["topk"] == 1.0
    clean = write_run(tmp_path / "clean" / "run", response=RESPONSE, **GAME)
    shown = contents(read_run(clean.path))
    assert [sample["values"] for sample in shown["samples"]] == [sample["values"] for sample in first["samples"]]
    assert shown["agreement"][0]["mean"] == first["agreement"][0]["mean"]


@needs_node
def test_a_game_reads_as_it_was_played(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", response=RESPONSE, **GAME)
    game, *_ = (page := drawn(run))["samples"]
    assert [turn["said"] for turn in game["turns"]] == list(TURNS)
    kinds = [turn["kind"] for turn in game["turns"]]
    assert kinds == ["turn acted", "turn observed grid", "turn acted", "turn observed grid", "turn acted"]
    assert [turn["coloured"] > 0 for turn in game["turns"]] == [True, False, True, False, True]
    labels = [turn["label"] for turn in game["turns"]]
    assert labels[1] == labels[3] == "observed" and labels[4].startswith("turn 3 · mean reverse KL ")
    assert labels[4].endswith(" · reward 1")
    assert game["prompt"] == [["prompt grid", GAME["prompt"]], ["prompt", ""]]
    assert game["markup"] == ["<|user|>", "<|end|>"]  # on lines of their own: the map stays in its columns
    assert f"{sum(ACTED)} tokens, {len(ACTED) - sum(ACTED)} observed" in game["chips"]
    poisoned(run)
    assert drawn(run)["samples"][0]["turns"] == game["turns"]
    assert drawn(run)["samples"][0]["tokens"] == page["samples"][0]["tokens"]


@needs_node
def test_an_answer_of_one_turn_has_no_blocks(tmp_path: Path) -> None:
    page = drawn(write_run(tmp_path / "run"))
    assert all(sample["turns"] == [] for sample in page["samples"])
    assert "".join(text for text, _ in page["samples"][0]["tokens"]) == "4+5=9 ok"


ROWS = [
    {"check": "action tokens", "value": "464", "verdict": "ok", "meaning": "written by the student"},
    {"check": "mean log-prob, samples", "value": "-16.8", "verdict": "failed", "meaning": "another model's weights"},
]


def test_a_run_that_the_preflight_ended_shows_its_table(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "exp" / "run")
    run.path.mkdir(parents=True)
    run.write_config("exp_name: lake\nmax_steps: 9\n")
    run.append_jsonl(METRICS, [{"step": 0, "time/startup": 2.0}])
    (run.path / "run.json").write_text(json.dumps({"mode": "pure"}))
    run.write_preflight("teacher", ROWS)
    note_end(run, RunError("the preflight of teacher teacher failed: mean log-prob, samples: -16.8"))
    data = Page(write_report(run.path).read_text()).data
    assert data["preflight"] == [{"teacher": "teacher", "rows": ROWS}] and data["preflight_first"] is True
    assert data["state"] == {
        "kind": "stopped",
        "text": "Stopped after 0 of 9 steps: the preflight of teacher teacher failed: mean log-prob, samples: -16.8",
    }
    if shutil.which("node"):
        assert drawn(run)["sections"] == ["preflight", "time", "run"]


@needs_node
def test_a_run_of_steps_without_samples_names_the_key(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run.path / SAMPLES).unlink()
    assert any("No samples were recorded (logged_samples_per_step)" in text for text in drawn(run)["text"])


@needs_node
def test_the_table_of_time_is_of_the_whole_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_summary(run, seed=0, end_seconds=8.4)  # 12.5 s of start-up and 6 steps of 3.6 s
    page = drawn(run)
    text = page["text"][page["sections"].index("time")]
    assert "43 s in all" in text and "end8.4 s20 %" in text and "generate12 s28 %" in text


def test_an_unforeseen_error_is_named_by_its_class(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    ended = {}
    for error in (KeyError("weights"), KeyboardInterrupt(), Terminated("ended by SIGTERM after step 3")):
        (run.path / "run.json").write_text("{}")
        note_end(run, error)
        ended[type(error).__name__] = json.loads((run.path / "run.json").read_text())["ended"]
    assert ended == {
        "KeyError": "KeyError: 'weights'",
        "KeyboardInterrupt": "interrupted",
        "Terminated": "ended by SIGTERM after step 3",
    }


@pytest.mark.parametrize(
    ("pipeline", "reward", "what"),
    [
        ("agentic", 1.0, "Fraction of held-out games that were won."),
        ("agentic", 0.5, "Mean reward of held-out games."),
        ("rlvr", 1.0, "Fraction of correct answers to held-out prompts."),
    ],
)
def test_games_are_won_and_answers_are_right(pipeline: str, reward: float, what: str, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run.path / "run.json").write_text(json.dumps({"pipeline": pipeline}))
    graded = {} if reward == 1.0 else {"val/reward/max": reward}
    run.append_jsonl(METRICS, [{"step": 6, "val_correct/all/mean": reward, **graded}])
    assert [chart["what"] for chart in contents(read_run(run.path))["charts"]][1] == what


def test_a_preflight_that_passed_stands_at_its_place(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    run.write_preflight("teacher", ROWS[:1])
    data = contents(read_run(run.path))
    assert data["preflight_first"] is False and data["preflight"][0]["rows"] == ROWS[:1]
