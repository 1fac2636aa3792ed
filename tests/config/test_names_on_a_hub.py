"""Models and data sets by name, from a server that speaks the hub's protocol, through the unmodified clients."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from config_assets import write_model

from roll_opd.base import hub
from roll_opd.base.failures import ConfigError
from roll_opd.commands.main import main
from roll_opd.config.plan import RunPlan
from roll_opd.data.row_files import open_file
from roll_opd.pipelines.named_inputs import with_inputs
from tests.hub_server import BROKEN, DEAD, DOWN, GATED, OUTSIDER, PRIVATE, SLOW, TOKEN, HubServer, serve

Plan = Callable[..., RunPlan]
STUDENT, TEACHER = "student_train.model_args.model_name_or_path", "teacher.model_args.model_name_or_path"
PART = "student_train.data_args"
ROWS = f"{PART}.file_name"
PROBLEM = {"question": "1+1", "answer": "It is <<1+1=2>>2.\n#### 1,002"}


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    with serve(tmp_path / "hub") as found:
        for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "USE_MODELSCOPE", "MODEL_DOWNLOAD_TYPE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def publish(server: HubServer, name: str, seed: int = 3) -> Path:
    """Publish a tiny model, with copies of its weights in other formats."""
    path = write_model(server.folder / "models" / name, seed=seed)
    (path / "original").mkdir(exist_ok=True)
    for copy in ("pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors", "model.gguf"):
        (path / copy).write_bytes(b"0" * 100)
    return path


def publish_rows(server: HubServer, name: str, files: dict[str, list[dict[str, Any]]], readme: str = "") -> None:
    path = server.folder / "datasets" / name
    for file, rows in files.items():
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        (path / file).write_text("".join(json.dumps(row) + "\n" for row in rows))
    if readme:
        (path / "README.md").write_text(readme)


def started(plan: Plan, changes: dict[str, Any], **options: Any) -> tuple[RunPlan, list[str]]:
    """Plan as a run does: with downloads. Return the plan and the lines about downloads."""
    said: list[str] = []
    return with_inputs(lambda: plan(changes, **options), said.append), said


def refused(plan: Plan, changes: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        started(plan, changes)
    return caught.value.problems


def test_a_run_downloads_what_it_needs_once_and_a_plan_nothing(server: HubServer, plan: Plan, root: Path) -> None:
    publish(server, "org/student")
    names = {STUDENT: ..., "student_infer.model_args": ..., "pretrain": "org/student"}
    with pytest.raises(ConfigError) as caught:
        plan(names)
    assert not server.requests and "a run downloads" in str(caught.value)

    found, said = started(plan, names)
    wanted = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert server.fetched("org/student") == wanted
    path = Path(found.student.model.path)
    assert {file.name for file in path.iterdir()} == set(wanted) and not found.downloads
    assert found.hub["org/student"].commit == path.name == server.commit("models", "org/student")
    sizes = sum((server.folder / "models/org/student" / file).stat().st_size for file in wanted[1:2])
    assert any(hub.readable(sizes) in line and "free" in line for line in said)

    server.requests.clear()
    again, said = started(plan, names)
    assert again.student.model == found.student.model and not server.requests and not said
    assert plan(names).student.model == found.student.model and not server.requests


def test_a_wrong_configuration_downloads_no_weights(server: HubServer, plan: Plan) -> None:
    publish(server, "org/student")
    (problem,) = refused(plan, {STUDENT: "org/student", "student_infer.model_args": ..., "rollout_batch_size": 7})
    assert "rollout_batch_size" in problem or "sequences" in problem
    assert "model.safetensors" not in server.fetched("org/student")


def test_plan_with_fetch_reads_small_files_and_states_the_rest(
    server: HubServer, plan: Plan, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish(server, "org/teacher")
    with hub.downloading(lambda text: None):
        found = plan({TEACHER: "org/teacher@v1"})
    size = (server.folder / "models/org/teacher/model.safetensors").stat().st_size
    file = str(root / "config" / "run.yaml")
    capsys.readouterr()
    for words, known in (([], None), (["--fetch"], size)):
        assert main(["plan", "--json", *words, file]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["downloads"] == {"org/teacher@v1": known}
        assert shown["hub"] == {"org/teacher@v1": server.commit("models", "org/teacher")}
    (download,) = found.downloads
    assert str(download.name) == "org/teacher@v1" and download.key == TEACHER
    assert "model.safetensors" not in server.fetched("org/teacher") and found.memory["teacher"]


def test_faults_are_one_sentence_with_key_value_and_remedy(
    server: HubServer, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    for owner in ("org", PRIVATE, GATED, DEAD, DOWN):
        publish(server, f"{owner}/model")
    (publish(server, "org/bins") / "model.safetensors").unlink()
    cases = (
        ("org/none", "", "HTTP 401", "HF_TOKEN"),
        ("org/none", OUTSIDER, "HTTP 404", "correct the name"),
        (f"{PRIVATE}/model", OUTSIDER, "HTTP 404", "HF_TOKEN"),
        (f"{GATED}/model", "", "HTTP 401", f"accept its conditions at {server.url}/{GATED}/model"),
        (f"{GATED}/model", OUTSIDER, "HTTP 403", "accept its conditions"),
        ("org/model", "hf_wrong", "refuses the token", "HF_TOKEN"),
        ("org/model@nightly", "", "no revision 'nightly'", "after @"),
        ("org/bins", "", "pytorch_model.bin", "safetensors"),
        (f"{DOWN}/model", "", "HTTP 503", "later"),
    )
    for name, token, fact, remedy in cases:
        monkeypatch.setenv("HF_TOKEN", token)
        (problem,) = refused(plan, {TEACHER: name})
        assert problem.startswith(f"{TEACHER}: {name}: ") and "(run.yaml:" in problem, problem
        assert fact in problem and remedy in problem and "\n" not in problem, problem
        assert not token or token not in problem
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    for owner in (PRIVATE, GATED):
        assert started(plan, {TEACHER: f"{owner}/model"})[0].hub


def test_offline_a_run_uses_the_cache_or_is_refused(
    server: HubServer, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, "org/model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (problem,) = refused(plan, {TEACHER: "org/model"})
    assert "HF_HUB_OFFLINE" in problem and not server.requests
    monkeypatch.delenv("HF_HUB_OFFLINE")
    started(plan, {TEACHER: "org/model"})
    server.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert started(plan, {TEACHER: "org/model"})[0].hub and not server.requests


def test_a_download_that_does_not_fit_is_refused_before_it_begins(
    server: HubServer, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(server, "org/model")
    monkeypatch.setattr(hub, "free_space", lambda path: 2**20)
    (problem,) = refused(plan, {TEACHER: "org/model"})
    assert "1.05 MB free" in problem and "HF_HOME" in problem and not server.sent


def test_an_interrupted_download_continues(server: HubServer, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    publish(server, f"{BROKEN}/model")
    found, _ = started(plan, {TEACHER: f"{BROKEN}/model"})
    assert found.hub and not found.downloads
    publish(server, f"{DEAD}/model")
    (problem,) = refused(plan, {TEACHER: f"{DEAD}/model"})
    assert problem.startswith(f"{TEACHER}: {DEAD}/model: ") and "start again" in problem and "(run.yaml:" in problem
    server.requests.clear()
    (server.folder / "models" / DEAD).rename(server.folder / "models" / "gone")
    with pytest.raises(ConfigError):  # what arrived is kept, and is not taken for the whole
        plan({TEACHER: f"{DEAD}/model", "rollout_batch_size": 7})
    assert plan({TEACHER: f"{DEAD}/model", "rollout_batch_size": 8}).downloads and not server.requests


FETCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # tests in the background ignore it
from roll_opd.base import hub
with hub.downloading(print):
    hub.fetch(hub.HubName("model", sys.argv[1]), lambda files: ["config.json", "model.safetensors"])
"""


def test_an_ended_process_leaves_no_parts_of_files(server: HubServer, tmp_path: Path) -> None:
    """The client's threads cannot be interrupted, and it never continues a part of a file."""
    path = publish(server, f"{SLOW}/model")
    with (path / "model.safetensors").open("ab") as file:
        file.write(bytes(hub.SMALL))  # a large file, for which there is a child process
    for number, code in ((signal.SIGINT, 1), (signal.SIGKILL, -signal.SIGKILL)):
        server.sent.clear()
        run = subprocess.Popen([sys.executable, "-c", FETCH, f"{SLOW}/model"], stderr=subprocess.DEVNULL)
        wait_until(lambda: f"{SLOW}/model/model.safetensors" in server.sent)
        wait_until(lambda: bool([*tmp_path.rglob("*.incomplete")] and [*tmp_path.rglob("snapshots/*/config.json")]))
        run.send_signal(number)
        assert run.wait(timeout=20) in (code, -number)
        wait_until(lambda: not [*tmp_path.rglob("*.incomplete")])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_resumed_run_keeps_its_commits(server: HubServer, plan: Plan, root: Path, tmp_path: Path) -> None:
    publish(server, "org/model")
    first, _ = started(plan, {TEACHER: "org/model"})
    run = root / "output" / "tiny" / "20260101-000000-abcdef"
    checkpoint = run / "checkpoints" / "step_1"
    (checkpoint / "state").mkdir(parents=True)
    (checkpoint / "run_state.json").write_text(json.dumps({"step": 1, "source": {}}))
    (run / "run.json").write_text(json.dumps({"hub": {name: use.commit for name, use in first.hub.items()}}))
    publish(server, "org/model", seed=9)
    shutil.rmtree(tmp_path / "home" / "hub" / "models--org--model" / "refs")
    second, said = started(plan, {TEACHER: "org/model", "resume_from_checkpoint": True})
    assert second.hub == first.hub and any("continues with commit" in line for line in said)
    third, _ = started(plan, {TEACHER: "org/model", "resume_from_checkpoint": False})
    assert third.hub != first.hub


def test_data_sets_have_ready_mappings(server: HubServer, plan: Plan) -> None:
    publish_rows(
        server,
        "openai/gsm8k",
        {
            "main/train.jsonl": [PROBLEM] * 3,
            "main/test.jsonl": [PROBLEM],
            "socratic/train.jsonl": [PROBLEM],
        },
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n"
        "  - split: train\n    path: main/train*\n  - split: test\n    path: main/test*\n"
        "- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train*\n---\n",
    )  # fmt: skip
    publish_rows(server, "org/math", {"train.jsonl": [{"problem": "p", "solution": r"so \boxed{\frac{1}{2}}."}]})
    publish_rows(server, "org/deepmath", {"train.jsonl": [{"question": "q", "final_answer": "7", "topic": "x"}]})
    chat = {"system": "s", "conversations": [{"from": "human", "value": "h"}, {"from": "gpt", "value": "g"}]}
    publish_rows(server, "org/thoughts", {"train.jsonl": [chat]})
    csv = server.folder / "datasets/org/table/train.csv"
    csv.parent.mkdir(parents=True)
    csv.write_text("question,answer\nq,12\n")
    for name, truth in (
        ("openai/gsm8k", "1002"),
        ("org/math", r"\frac{1}{2}"),
        ("org/deepmath", "7"),
        ("org/thoughts", None),
        ("org/table", "12"),
    ):
        found, _ = started(plan, {ROWS: name})
        rows = [row for file in found.data.files for _, _, row in open_file(file).scan()]
        assert len(rows) == (3 if "gsm8k" in name else 1) and rows[0].get("ground_truth") == truth
        assert found.hub[name].reading.startswith("train: ")
        server.requests.clear()
        assert plan({ROWS: name}).data == found.data and not server.requests
    assert server.fetched("openai/gsm8k") == ["README.md", "main/train.jsonl"]
    mixed = {ROWS: ["org/math", "openai/gsm8k"], f"{PART}.interleave_probs": "0.5,0.5"}
    found, _ = started(plan, mixed)
    assert [stream.files for stream in found.data.streams] == [(file,) for file in found.data.files]
    own = {ROWS: "openai/gsm8k", f"{PART}.interleave_probs": ..., f"{PART}.split": "test", f"{PART}.prompt": "question"}
    found, _ = started(plan, own)
    assert [Path(file).name for file in found.data.files] == ["test.jsonl"] and found.data.columns[
        "prompt"
    ] == "question"


def test_a_data_set_that_does_not_fit_shows_what_it_has(server: HubServer, plan: Plan, root: Path) -> None:
    publish_rows(server, "org/odd", {"train.jsonl": [{"text": "t", "label": 1}], "test.jsonl": [{"text": "t"}]})
    for changes, fact in (
        ({}, "columns label, text"),
        ({f"{PART}.split": "dev"}, "train or test"),
        ({f"{PART}.split": ..., f"{PART}.subset": "big"}, "no subset 'big'"),
        ({ROWS: str(root / "train.jsonl"), f"{PART}.subset": "big"}, "has no effect"),
        ({ROWS: "org/none", f"{PART}.subset": ...}, "HTTP 401"),
    ):
        (problem,) = refused(plan, {ROWS: "org/odd", **changes})
        assert problem.startswith(f"{PART}.") and fact in problem and "(run.yaml:" in problem
