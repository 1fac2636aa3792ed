"""The report of a run: correct data, escaped hostile text, small pages for long runs, names of broken files."""

import itertools
import json
import math
import os
import re
import shutil
import subprocess
import time
import tomllib
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import yaml
from report_assets import Page, metrics_row, sample_row, write_run

from roll_opd.commands.main import main
from roll_opd.extras.report.page import contents, page, write_report
from roll_opd.extras.report.panels import before_after, charts
from roll_opd.extras.report.run_files import find_run, read_run
from roll_opd.extras.report.samples import agreement, shaped
from roll_opd.extras.report.text import script_json, visible
from roll_opd.pipelines.sample_texts import teacher_cuts_of
from roll_opd.samples.byte_alignment import Alignment
from roll_opd.samples.sample import Sample
from roll_opd.tracking.results_table import duration, totals
from roll_opd.tracking.run_directory import METRICS, SAMPLES, RunDirectory, read_jsonl, to_json
from roll_opd.tracking.summary import summarize, write_summary


def of(run: Path) -> Page:
    return Page(write_report(run).read_text(encoding="utf-8"))


def test_only_a_difference_beyond_noise_is_judged(tmp_path: Path) -> None:
    """Of validation by the standard errors on record, of steps by the noise between them; unknown: no verdict."""
    rng = np.random.default_rng(0)
    for stderr, noise in ((0.02, False), (0.2, True), (None, None)):
        known = {} if stderr is None else {"val_correct/all/stderr": stderr}
        rows = [{"step": 0, "val_correct/all/mean": 0.5, **known}]
        rows += [{"step": n, "critic/score/mean": 0.3 + 0.1 * rng.normal(), "sft/loss": 9.0 - n} for n in range(1, 40)]
        rows.append({"step": 40, "val_correct/all/mean": 0.65, **known})
        table = {row["name"]: row["noise"] for row in before_after(rows, "pure")}
        assert table == {"Validation accuracy": noise, "Reward": True, "Loss, training": False}


def test_steps_of_other_settings_are_not_judged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=40)
    for key, judged in (("actor_infer.generating_args.temperature", False), ("max_steps", True)):
        parts = [{"first": 1, "last": 20, "changed": {}}, {"first": 21, "last": 40, "changed": {key: [1, 2]}}]
        (run.path / "run.json").write_text(json.dumps({"parts": parts}))
        table = {row["name"]: row["noise"] for row in of(run.path).data["table"]}
        assert (table["Reverse KL to the teacher"] is not None) == judged


def test_a_mean_reward_is_not_called_an_accuracy() -> None:
    rows = [{"step": 0, "val_correct/all/mean": 0.0}, {"step": 2, "val_correct/all/mean": 0.4, "val/reward/max": 0.9}]
    assert [row["name"] for row in before_after(rows, "rl")] == ["Validation reward"]
    assert [chart["title"] for chart in charts(rows, "rl")] == ["Validation reward"]


def test_console_summary_and_report_have_one_set_of_totals(tmp_path: Path) -> None:
    """Of a run in two parts, while it is going on and when it has ended."""
    run = write_run(tmp_path / "exp" / "run", steps=4)
    run.summary_file.unlink()
    run.append_jsonl(METRICS, [metrics_row(step, 6) | {"time/startup": 7.0 * (step == 5)} for step in (5, 6)])
    rows = read_jsonl(run.metrics_file)
    rows[0]["time/validate"] = 5.0  # before the first step
    rows[4] |= {"time/validate": 3.25, "time/step": rows[4]["time/step"] + 3.25}
    run.metrics_file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    seconds = 12.5 + 5.0 + 7.0 + sum(row["time/step"] for row in rows[1:])
    for end in (0.0, 3.5):
        if end:
            write_summary(run, seed=0, end_seconds=end)
        summary = json.loads(run.summary_file.read_text()) if end else summarize(rows)
        data = of(run.path).data
        figures, shown = data["figures"], data["time"]
        assert figures["steps"] == summary["steps"] == 6
        assert figures["tokens"] == summary["generated_tokens"] == 6000
        assert figures["seconds"] == pytest.approx(summary["wall_seconds"]) == pytest.approx(seconds + end)
        assert totals(summary).startswith(f"6 steps, 6.0k generated tokens, {duration(figures['seconds'])} wall time")
        assert "validation 8s" in totals(summary)
        phases = dict(zip(shown["phases"], shown["total"], strict=True))
        assert phases == {name: pytest.approx(value) for name, value in summary["phase_seconds"].items() if value}
        assert phases["validate"] == 8.25 and shown["startup"] == summary["startup_seconds"] == 19.5
        parts = (shown["startup"], *shown["total"], shown["end"])
        assert sum(parts) == pytest.approx(figures["seconds"]) and shown["end"] == pytest.approx(end)


def test_the_data_equal_the_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "exp" / "run")
    data = of(run.path).data
    rows = read_jsonl(run.metrics_file)
    for chart in data["charts"]:
        for line in chart["lines"]:
            name = line["metric"]
            expected = [(row["step"], row[name]) for row in rows if name in row] or [
                (row["step"], -row["opd/student_logprob"]) for row in rows[1:]
            ]
            assert line["points"] == [[step, pytest.approx(value, rel=1e-5)] for step, value in expected]
    titles = [chart["title"] for chart in data["charts"]]
    assert titles[:3] == ["Reverse KL to the teacher", "Validation accuracy", "Reward"]
    assert "Clipped tokens" not in titles and "KL to the reference policy" not in titles
    accuracy = data["charts"][1]
    assert accuracy["references"] == [{"name": "teacher", "value": 1.0}, {"name": "start", "value": 0.125}]
    assert data["mode_title"] == "training" and data["state"]["kind"] == "finished"  # no title is on record
    table = {row["name"]: row for row in data["table"]}
    assert (table["Validation accuracy"]["before"], table["Validation accuracy"]["after"]) == (0.125, 0.875)
    assert table["Validation accuracy"]["teacher"] == 1
    assert data["time"]["startup"] == 12.5 and dict(
        zip(data["time"]["phases"], data["time"]["total"], strict=True)
    ) == {
        "generate": 12,
        "teacher": 3,
        "train": 6,
        "other": pytest.approx(0.6),
    }
    assert data["facts"] == [["run directory", str(run.path)], ["torch", "2.0"]]


def test_every_token_has_its_recorded_values(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", response="ab\ncd é", loss_mask=[True] * 4 + [False] * 3)
    data = of(run.path).data
    recorded = read_jsonl(run.path / SAMPLES)
    assert len(data["samples"]) == len(recorded) == 24
    for shown, row in zip(data["samples"], recorded, strict=True):
        assert shown["pieces"] == list("ab\ncd é") and shown["ids"] == row["tokens"][2:]
        assert shown["masked"] == [4, 5, 6] and shown["behind"] == 0 and shown["reward"] == row["reward"]
        for name, column in (
            ("student", "student_logprobs"),
            ("rollout", "rollout_logprobs"),
            ("advantage", "advantages"),
        ):
            assert shown["values"][name] == pytest.approx(row[column], rel=1e-3)
        assert shown["values"]["teacher/teacher"] == pytest.approx(row["teacher_logprobs"]["teacher"], rel=1e-3)
    pairs = [[(answer["by"], answer["step"]) for answer in group] for group in data["pairs"]]
    assert pairs == [[("student", 0), ("student", 6), ("teacher/big", 0)], [("student", 0), ("student", 6)]]
    early = [row for row in recorded if row["step"] == 1]
    gaps = np.concatenate([np.subtract(row["student_logprobs"], row["teacher_logprobs"]["teacher"]) for row in early])
    agreement = data["agreement"][0]
    assert (agreement["from"], agreement["to"], agreement["tokens"]) == (1, 1, len(gaps))
    assert agreement["mean"] == pytest.approx(gaps.mean(), abs=1e-3)
    assert agreement["close"] == pytest.approx(np.mean(np.abs(gaps) < 0.1), abs=1e-3)
    assert sum(agreement["bins"]) == pytest.approx(1, abs=1e-2)


def test_the_page_has_the_cuts_of_both_tokenizers(tmp_path: Path) -> None:
    """The student's tokens are the characters; the teacher has no token for the last one."""
    response, theirs = "4+5=9 ok", ("4+", "5", "=9 ", "o", "")
    cut = Alignment(
        np.arange(1, 9),
        np.array([2, 3, 6, 7, 8]),
        np.array([False] * 4 + [True]),
        np.ones(8, bool),
        response.encode(),
    )
    sample = Sample(np.arange(9), 1, {"action_mask": np.ones(8, bool)}, alignments={"teacher": cut})
    run = write_run(tmp_path / "run", response=response, **teacher_cuts_of(sample))
    counts = (2, 1, 3, 1)
    expected = [[n, [text]] for n, text in zip(counts, theirs, strict=False) for _ in range(n)]
    for shown in of(run.path).data["samples"]:
        assert shown["pieces"] == list(response)
        assert shown["cuts"] == {"teacher": [*expected, None]}


HOSTILE = (
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "]]><img src=x onerror=alert(1)>",
    "\u2028\u2029\u202eevil\u202c\u2066x\u2069",
    "\ufeff\u200b\u0000\u001b[31m\x85",
    "\ud800 half",
    "{{DATA}}{{SCRIPT}}&amp;&lt;",
    "\U000e0041\U000e0042",
)


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    """With any text of a model, row, name or metric, the page has the same elements and shows the text."""
    names = ("id", "tag", "prompt", "ground_truth", "reward_reason", "finish_reason")
    innocent = of(write_run(tmp_path / "innocent").path)
    for number, text in enumerate(HOSTILE):
        run = write_run(tmp_path / f"{number}", response=text, **dict.fromkeys(names, text))
        with (run.path / METRICS).open("a") as file:
            file.write(json.dumps({"step": 6, text: 1.0}) + "\n")
        given = {"steps": 6, "warnings": [text], "preflight": {text: [{"check": text, "verdict": text}]}}
        run.summary_file.write_text(json.dumps({**given, "versions": {text: text}}))
        run.config_file.write_text(yaml.safe_dump({"exp_name": text}))
        raw = write_report(run.path).read_bytes()
        found = Page(raw.decode())
        assert found.tags == innocent.tags and found.comments == innocent.comments == []
        assert found.text["script"] == innocent.text["script"]
        shown = visible(text)
        data = found.data
        assert "".join(data["samples"][0]["pieces"]) == data["samples"][0]["prompt"] == data["title"] == shown
        assert data["warnings"] == [shown] and data["preflight"][0]["rows"][0]["check"] == shown
        assert shown in data["metrics"] and [shown, shown] in data["facts"]
        unseen = {"Cc", "Cf", "Cs", "Zl", "Zp"}
        assert {unicodedata.category(c) for c in raw.decode()} & unseen <= {"Cc"}  # line feeds
        assert not {c for c in json.dumps(data, ensure_ascii=False) if unicodedata.category(c) in unseen} - {"\n", "\t"}


def test_no_character_ends_its_script() -> None:
    text = " ".join(map(chr, itertools.chain(range(0x3000), range(0xD7F0, 0xE010), (0xFEFF, 0x1F600, 0xE0041))))
    written = script_json({"text": text})
    assert json.loads(written)["text"] == text
    assert written.isascii() and not set(written) & set("<>&\n\r\u2028")
    with pytest.raises(ValueError, match="JSON"):
        script_json(float("nan"))


def test_nothing_is_loaded_and_nothing_else_can_run(tmp_path: Path) -> None:
    found = of(write_run(tmp_path / "run").path)
    (policy,) = [value for name, value in found.attributes if name == "content" and value and "default-src" in value]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert not [
        name for name, _ in found.attributes if name in ("src", "href", "srcset", "style") or name.startswith("on")
    ]
    assert "innerHTML" not in found.text["script"] and "document.write" not in found.text["script"]
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", found.text["script"] + found.text["style"]
    )


@pytest.mark.slow
def test_a_run_of_5000_steps_is_small_and_keeps_its_extremes(tmp_path: Path) -> None:
    """With 60 metrics, long responses and 500 validations; its single spike is visible."""
    steps, run = 5000, RunDirectory(tmp_path)
    run.write_config("exp_name: long\nmax_steps: 5000\n")
    more = {f"reward/domain_{number}/mean": 0.0 for number in range(50)}
    rows = [{**metrics_row(step, steps), **{name: math.sin(step) for name in more}} for step in range(1, steps + 1)]
    rows[3333]["opd/reverse_kl/mean"] = 77.0
    rows[1234]["opd/reverse_kl/mean"] = -55.0
    run.append_jsonl(METRICS, rows)
    response = "the quick brown fox jumps over it " * 40
    for step in range(1, steps + 1, 500):
        run.append_jsonl(SAMPLES, [sample_row(step, number, response) for number in range(4)])
    began = time.monotonic()
    written = write_report(tmp_path)
    assert time.monotonic() - began < 20
    assert written.stat().st_size < 5_000_000
    data = Page(written.read_text()).data
    points = data["charts"][0]["lines"][0]["points"]
    assert len(points) <= 1000 and [3334, 77.0] in points and [1235, -55.0] in points
    assert points[0][0] == 1 and points[-1][0] == steps and points == sorted(points)
    assert len(data["charts"][0]["lines"][0]["trend"]) == 100
    shown = data["samples"]
    assert shown[0]["step"] == 1 and shown[-1]["step"] == 4501 and sum(len(one["pieces"]) for one in shown) <= 40_000
    for one in shown:  # the beginning and the end
        head = one["cut"]["at"]
        assert "".join(one["pieces"]) == response[:head] + response[len(response) - (len(one["pieces"]) - head) :]
        assert one["cut"]["count"] == len(response) - len(one["pieces"])


def break_metrics(run: Path) -> None:
    with (run / METRICS).open("ab") as file:
        file.write(b'{"step": 5, "opd/rev')


def write_nonsense(run: Path) -> None:
    lines = [b"null", b"[1]", b"{}", b'{"step": "x"}', b'{"step": true}', b'{"step": -1}', b"\xff\xfe", b"[" * 100_000]
    lines += [b'{"step": 3, "a": NaN, "b": 1e999, "c": "text", "d": null, "e": ' + b"9" * 400 + b"}"]
    (run / METRICS).write_bytes(b"\n".join(lines))


def odd_samples(run: Path) -> None:
    odd = [
        {"step": 1},
        {"step": 1, "response": 5, "tokens": "x", "prompt_length": [], "token_ends": {}, "teacher_logprobs": 3},
        {"step": 2, "response": "ab", "tokens": [1, 2], "prompt_length": 9, "token_ends": [1, 2]},
        {"step": 2, "response": "ab", "tokens": [1, 2, 3], "prompt_length": 1, "token_ends": [2, 1]},
        {
            "step": 3,
            "response": "ab",
            "tokens": [1, 2, 3],
            "prompt_length": 1,
            "token_ends": [1, 2],
            "student_logprobs": [None, "x"],
        },
    ]
    (run / SAMPLES).write_text("".join(json.dumps(row) + "\n" for row in odd) + '{"step": 3, "respon')


BROKEN = {
    "half a line": (break_metrics, "metrics.jsonl: 1 line cannot be read"),
    "nonsense": (write_nonsense, "metrics.jsonl: 8 lines cannot be read"),
    "no metrics": (lambda run: (run / METRICS).unlink(), "metrics.jsonl is missing"),
    "empty metrics": (lambda run: (run / METRICS).write_text(""), ""),
    "a directory": (
        lambda run: ((run / METRICS).unlink(), (run / METRICS).mkdir()),
        "metrics.jsonl is not a regular",
    ),
    "a FIFO": (lambda run: ((run / SAMPLES).unlink(), os.mkfifo(run / SAMPLES)), "samples.jsonl is not a regular file"),
    "odd samples": (odd_samples, "samples.jsonl: 1 line cannot be read"),
    "no samples": (lambda run: (run / SAMPLES).unlink(), ""),
    "odd summary": (lambda run: (run / "summary.json").write_text("[1"), "summary.json is not a JSON object"),
    "odd values": (
        lambda run: (run / "summary.json").write_text(
            '{"steps": 6, "warnings": 3, "versions": [], "teacher_preflight": {"a": 1}}'
        ),
        "",
    ),
    "odd facts": (lambda run: (run / "run.json").write_text('{"mode": 3, "machine": "x", "ended": []}'), ""),
    "odd configuration": (lambda run: (run / "config.yaml").write_text("a: [\x00"), "config.yaml is not valid YAML"),
    "no configuration": (lambda run: (run / "config.yaml").unlink(), "config.yaml is missing"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_become_sentences(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run").path
    harm, sentence = BROKEN[case]
    harm(run)
    assert main(["report", str(run)]) == 0
    assert "report.html" in capsys.readouterr().out
    problems = Page((run / "report.html").read_text()).data["problems"]
    assert [problem.startswith(sentence) for problem in problems] == [True] if sentence else problems == []


ODD = (
    None,
    math.nan,
    math.inf,
    1e308,
    -1,
    True,
    10**30,
    "x" * 100_000,
    "\ud800<",
    [],
    {},
    [math.nan],
    [[1]],
    {"a": [1, "b"]},
)


def test_the_page_can_be_written_for_records_of_any_types(tmp_path: Path) -> None:
    """Each key of samples, answers, facts and summary with each unusual value, and many of them together."""
    run, rng = write_run(tmp_path / "run"), np.random.default_rng(0)
    whole = sample_row(9, 0)
    rows = [{**whole, key: value} for key, value in itertools.product(list(whole)[1:], ODD)]
    for _ in range(100):
        rows.append({**whole, **{str(key): ODD[rng.integers(len(ODD))] for key in rng.choice(list(whole)[1:], 5)}})
    rows = [{**row, "step": 1 + number % 99} for number, row in enumerate(rows)]
    for name in (SAMPLES, "validation_samples.jsonl"):
        lines = [json.dumps({**row, "by": row["tag"]}, default=np.ndarray.tolist) for row in rows]
        (run.path / name).write_text("".join(f'{line[:-1]}, "step": NaN}}\n' for line in lines))
    for odd in ODD:
        names = ("warnings", "versions", "teacher_preflight", "title", "mode", "models", "machine", "ended", "steps")
        run.summary_file.write_text(json.dumps({**dict.fromkeys(names, odd), "versions": {"a": odd}}))
        (run.path / "run.json").write_text(
            json.dumps({**dict.fromkeys(names, odd), "teacher_preflight": {"t": [{"check": odd}]}})
        )
        (run.path / "config.yaml").write_text(yaml.safe_dump(dict.fromkeys(("exp_name", "max_steps", "use_opd"), odd)))
        found = of(run.path)
        assert found.data["samples"] and len(found.text["data"]) < 2_000_000
    lines = read_run(run.path).samples
    assert len([script_json(shaped(row, 5)) for row in lines.rows(lines.steps)]) == len(rows)
    assert agreement(lines, lines.steps)


def test_the_state_of_a_run_is_finished_stopped_or_open(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert of(run.path).data["state"] == {"kind": "finished", "text": "Finished: 6 of 6 steps."}
    run.append_jsonl(METRICS, [metrics_row(7, 7)])  # the summary is now of the run before it was resumed
    assert of(run.path).data["state"]["kind"] == "open"
    run.summary_file.unlink()
    assert re.match(r"Not finished: 7 of 6 steps, the last one written 20", of(run.path).data["state"]["text"])
    (run.path / "run.json").write_text('{"title": "distillation", "ended": "RunError: all is lost"}')
    data = of(run.path).data
    assert data["state"] == {"kind": "stopped", "text": "Stopped after 7 of 6 steps: RunError: all is lost"}
    assert data["mode_title"] == "distillation"


def test_runs_without_a_rollout(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_jsonl(METRICS, [{"step": 0, "val/loss": 2.0, "val/dpo/margin": 0.0}])
    run.append_jsonl(METRICS, [{"step": 1, "dpo/loss": 0.6, "dpo/margin": 0.1, "dpo/accuracy": 1.0, "time/train": 1.0}])
    run.append_jsonl(METRICS, [{"step": 2, "dpo/loss": 0.5, "dpo/margin": 0.3, "dpo/accuracy": 1.0, "val/loss": 1.0}])
    (tmp_path / "run.json").write_text('{"mode": "dpo", "title": "direct preference optimization"}')
    data = contents(read_run(tmp_path))
    assert data["mode"] == "dpo" and [chart["title"] for chart in data["charts"]] == [
        "Loss",
        "Pairs in the right order",
        "Margin",
    ]
    assert [line["metric"] for line in data["charts"][0]["lines"]] == ["dpo/loss", "val/loss"]
    assert data["samples"] == data["pairs"] == data["agreement"] == []
    assert Page(page(data)).data["mode_title"] == "direct preference optimization"


def test_a_path_without_a_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "exp" / "one").path
    (tmp_path / "exp" / "latest").symlink_to("one")
    assert find_run(tmp_path / "exp") == run.resolve()
    assert main(["report", str(tmp_path / "exp"), "--output", str(tmp_path / "there.html")]) == 0
    assert (tmp_path / "there.html").exists() and not (run / "report.html").exists()
    (tmp_path / "empty").mkdir()
    for wrong, said in (("nowhere", "no such directory"), ("empty", "not a run directory")):
        assert main(["report", str(tmp_path / wrong)]) == 2
        assert said in capsys.readouterr().err
    assert main(["report", str(run), "--output", str(tmp_path / "none" / "x.html")]) == 2
    assert "--output" in capsys.readouterr().err


def test_the_wheel_has_all_parts_of_the_page() -> None:
    root = Path(__file__).parents[3]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    shipped = {
        path for pattern in data["roll_opd.extras.report"] for path in (root / "roll_opd/extras/report").glob(pattern)
    }
    assert shipped == set((root / "roll_opd/extras/report/assets").iterdir())
    assert len(shipped) == 6


@pytest.mark.skipif(shutil.which("node") is None, reason="node runs the program of the page")
def test_labels_of_the_axes_are_whole(tmp_path: Path) -> None:
    digit, margin = 0.636 * 11.5, 1.0  # px: digits of DejaVu Sans, the widest of the page's fonts; room for signs
    run = write_run(tmp_path / "run", steps=2)
    scales = (-1.2e-5, 0.0001234, 0.01275, 0.125, 1.0005, -12.5, -1234.5, 98765.4, 2.5e6, 1e12)
    rows = [
        {"step": step, "opd/reverse_kl/mean": scale * (1 + step / 30000), "actor/grad_norm": scale * step}
        for scale in scales
        for step in (1, 500, 19_990, 20_050)
    ]
    for start in range(0, len(rows), 4):
        (run.path / METRICS).write_text("".join(to_json(row) + "\n" for row in rows[start : start + 4]))
        command = ["node", str(Path(__file__).with_name("dom.js")), str(write_report(run.path)), "240,320,1000"]
        charts = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["charts"]
        assert {chart["width"] for chart in charts} == {240, 320, 1000}
        for chart in charts:
            for text, x, anchor in chart["labels"]:
                wide = digit * len(text) + margin
                left = x - (wide if anchor == "end" else wide / 2)
                assert left >= 0 and left + wide <= chart["width"], (text, x, chart["width"])


def test_the_four_curves_of_student_and_teacher_are_one_panel() -> None:
    names = ("opd/student_perplexity", "opd/teacher_perplexity", "opd/teacher_logprob", "opd/reverse_kl/mean")
    rows = [{"step": step, **dict.fromkeys(names, 1.0 + step)} for step in range(1, 9)]
    panels = [[line["metric"] for line in chart["lines"]] for chart in charts(rows, "pure")]
    assert list(names) in panels and panels.count([names[-1]]) == 1
    assert len(before_after(rows, "pure")) == len(names)  # each metric once
    only_kl = [{"step": row["step"], names[-1]: row[names[-1]]} for row in rows]
    assert [[line["metric"] for line in chart["lines"]] for chart in charts(only_kl, "pure")] == [[names[-1]]]
