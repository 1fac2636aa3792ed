"""The endpoint for Prometheus, read by its client's parser, and the queries of the board."""

import json
import math
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from roll_opd.tracking.builtin.prometheus import exposition
from roll_opd.tracking.metrics_writer import MetricsWriter
from roll_opd.tracking.run_directory import RunDirectory, read_jsonl

parser = pytest.importorskip("prometheus_client.parser")
BOARD = Path(__file__).parents[2] / "examples/grafana/roll_opd.json"
RECORDED = Path(__file__).parent / "recorded_run/metrics.jsonl"


def parsed(text: str) -> dict[str, tuple[str, float, dict[str, str]]]:
    """Metric -> name, value and labels of its sample."""
    samples = [sample for family in parser.text_string_to_metric_families(text) for sample in family.samples]
    assert len({sample.labels["metric"] for sample in samples}) == len(samples)
    return {sample.labels["metric"]: (sample.name, sample.value, sample.labels) for sample in samples}


def test_every_metric_of_a_run_is_read_back() -> None:
    for row in read_jsonl(RECORDED):
        metrics = {name: value for name, value in row.items() if isinstance(value, int | float)}
        found = parsed(exposition(metrics, {"experiment": "e", "run": "r"}))
        assert {name: value for name, (_, value, _) in found.items()} == metrics
    hostile = {"a/b": 1.0, "a_b": 2.0, 'q"\\\n@1': math.inf, "n": math.nan, "m": -math.inf, "漢": 1e-300}
    found = parsed(exposition(hostile, {"experiment": 'x"\n\\', "run": "r"}))
    assert found.keys() == hostile.keys() and found["a/b"][0] == found["a_b"][0] == "roll_opd_a_b"
    assert all(value == hostile[name] or math.isnan(hostile[name]) for name, (_, value, _) in found.items())
    assert all(labels["experiment"] == 'x"\n\\' for _, _, labels in found.values())


def test_the_endpoint_has_the_last_step_until_the_run_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory.create(tmp_path, "exp")
    trackers = MetricsWriter.open(("prometheus",), run, args={"prometheus": {"port": 0}})
    [url] = re.findall(r"http://127\.0\.0\.1:\d+/metrics", capsys.readouterr().out)
    assert urllib.request.urlopen(url).read() == b""
    for step in (1, 2):
        trackers.log(step, {"opd/x": step / 2})
    found = {}
    while found.get("step", ("", 0.0))[1] != 2:
        with urllib.request.urlopen(url) as answer:
            found = parsed(answer.read().decode())
            assert "version=0.0.4" in answer.headers["Content-Type"]
    assert found["opd/x"][:2] == ("roll_opd_opd_x", 1.0) and found["opd/x"][2]["experiment"] == "exp"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(url.removesuffix("metrics"))
    other = MetricsWriter.open(
        ("prometheus",), run, args={"prometheus": {"port": int(url.split(":")[2].split("/")[0])}}
    )
    assert other.names == ("jsonl",) and "could not be opened" in capsys.readouterr().err
    trackers.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


def test_the_board_shows_metrics_that_runs_have() -> None:
    board = json.loads(BOARD.read_text())
    rows = read_jsonl(RECORDED)
    known = {name for row in rows for name in row} | {"last_step_timestamp_seconds"}
    page = (BOARD.parents[2] / "docs/metrics.md").read_text()
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    names = {name: text for name, (text, _, _) in parsed(exposition(dict.fromkeys(known, 0.0), {})).items()}
    for query in queries:
        [family] = re.findall(r"roll_opd_\w+", query)
        for metric in re.findall(r'metric="([^"]+)"', query):
            assert family == exposed(metric) and (metric in known or metric.partition("/")[0] in page), metric
        if "metric=" not in query:
            assert family in names.values(), query
    assert len(queries) == len(set(queries)) > 15
    variables = {each["name"] for each in board["templating"]["list"]}
    assert {name for query in queries for name in re.findall(r"\$(\w+)", query)} <= variables


def exposed(metric: str) -> str:
    return next(iter(parsed(exposition({metric: 0.0}, {})).values()))[0]
