"""The core without `roll_opd/extras` plans, distils and validates with `remote`, `format` and `math_verify`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from roll_opd.rewards.interface import RewardSample, Score
from roll_opd.rewards.reward_registry import REWARDS, resolve

REPOSITORY = Path(__file__).resolve().parents[1]
PROGRAM = """
import json, sys
from roll_opd.config.schema import PIPELINES
from roll_opd.planner.load_plan import load_plan
from roll_opd.rewards.interface import RewardSample
from roll_opd.rewards.reward_registry import REWARDS, resolve

words = ["+rewards.shape.worker_cls=format", "+rewards.shape.tag_included=[none]"]
words += ["+rewards.far.worker_cls=remote", "+rewards.far.url=http://127.0.0.1:9/", "+rewards.far.tag_included=[other]"]
plans = {name: load_plan("examples/demo", name, words if name == "rlvr_opd" else [])
         for name in ("onpolicy_distill", "rlvr_opd")}
samples = [RewardSample("a", text, "#### 12", "t") for text in sys.argv[1:]]
print(json.dumps({
    "rewards": REWARDS.builtin,
    "pipelines": sorted(PIPELINES),
    "math_rule": REWARDS.find("math_rule").__module__,
    "terms": sorted(term.worker for reward in plans["rlvr_opd"].rewards for term in reward.terms),
    "modes": [plan.mode for plan in plans.values()],
    "scores": [score.value for score in resolve("math_rule")(samples)],
}))
"""
ANSWERS = {r"\boxed{12}": 1.0, r"It is $\frac{24}{2}$.": 1.0, "The answer is 13.": 0.0, "<think> 12": 0.0, "none": 0.0}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package without its extras, beside the examples."""
    root = tmp_path_factory.mktemp("core")
    (root / "roll_opd").mkdir()
    for part in (REPOSITORY / "roll_opd").iterdir():
        if part.name != "extras":
            (root / "roll_opd" / part.name).symlink_to(part)
    for part in ("examples", "configs"):
        (root / part).symlink_to(REPOSITORY / part)
    return root


@pytest.mark.slow
def test_the_core_plans_and_scores_without_extras(core: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *ANSWERS],
        capture_output=True,
        text=True,
        cwd=core,
        env={**os.environ, "PYTHONPATH": str(core)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"format", "length_penalty", "math_rule", "math_verify", "remote"} == set(found["rewards"])
    assert found["math_rule"] == "roll_opd.rewards.builtin.math_verify"
    assert found["pipelines"] == ["dpo", "offline_distill", "rlvr", "sft"]
    assert found["terms"] == ["format", "math_rule", "remote"] and found["modes"] == ["pure", "mixed"]
    assert found["scores"] == list(ANSWERS.values())


class Scorer(BaseHTTPRequestHandler):
    """Gives every sample the reward 0.5."""

    def do_POST(self) -> None:
        samples = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["samples"]
        body = json.dumps({"rewards": [0.5] * len(samples)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def scorer() -> Iterator[str]:
    """The URL of a server of rewards."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Scorer) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.mark.nightly
def test_a_step_of_the_core_alone(core: Path, scorer: str, tmp_path: Path) -> None:
    """The rewards of three domains are in the records, and the run states that it has no report."""
    rows = [json.loads(line) for line in (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines()]
    tags = ("math_rule", "shape", "far")
    for name, number in (("train", 48), ("val", 6)):
        tagged = [{**row, "tag": tags[place % 3]} for place, row in enumerate(rows[:number])]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in tagged))
    words = [
        *("+rewards.shape.worker_cls=format", "+rewards.shape.tag_included=[shape]"),
        *("+rewards.far.worker_cls=remote", f"+rewards.far.url={scorer}", "+rewards.far.tag_included=[far]"),
        *("rewards.math_rule.tag_included=[math_rule]", "rollout_batch_size=12", "num_return_sequences_in_group=2"),
        f"actor_train.data_args.file_name=[{tmp_path / 'train.jsonl'}]",
        f"validation.data_args.file_name={tmp_path / 'val.jsonl'}",
        *("actor_train.training_args.per_device_train_batch_size=12", "max_steps=1", "save_steps=1", "eval_steps=1"),
        "logged_samples_per_step=24",
        *("actor_train.training_args.gradient_accumulation_steps=2", f"output_dir={tmp_path / 'output'}"),
    ]
    command = [sys.executable, "-m", "roll_opd", "run", "rlvr", "examples/demo/rlvr_opd.yaml", *words]
    environment = {**os.environ, "PYTHONPATH": str(core)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=core, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    run = (tmp_path / "output/demo_mixed/latest").resolve()
    samples = [json.loads(line) for line in (run / "validation_samples.jsonl").read_text().splitlines()]
    rewards = {tag: {row["reward"] for row in samples if row["tag"] == tag} for tag in tags}
    assert rewards["far"] == {0.5} and rewards["shape"] <= {0.0, 1.0} and rewards["math_rule"] <= {0.0, 1.0}
    (model,) = run.glob("checkpoints/*/hf")
    assert (model / "config.json").is_file() and not (model / "README.md").exists()
    assert "No report was written" in done.stdout and not (run / "report.html").exists()


@pytest.mark.nightly
def test_the_layers_of_the_core_alone(tmp_path: Path) -> None:
    """The tests of architecture and of the entry points pass in a copy without extras."""
    shutil.copytree(REPOSITORY / "roll_opd", tmp_path / "roll_opd", ignore=shutil.ignore_patterns("extras", "*.pyc"))
    for name in ("conftest.py", "bytecode.py", "groups.py", "test_architecture.py", "base/test_entry_points.py"):
        (tmp_path / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / "tests" / name, tmp_path / "tests" / name)
    shutil.copy(REPOSITORY / "pyproject.toml", tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.extras
def test_the_extras_answer_if_they_are_there() -> None:
    """The full grader has the name `math_rule`; it also knows units, which math-verify does not compare."""
    assert REWARDS.find("math_rule").__module__ == "roll_opd.extras.graders.rewards.math_rule"
    (score,) = resolve("math_rule")([RewardSample("a", r"\boxed{1.5\text{ km}}", r"\boxed{1500\text{ m}}", "t")])
    assert isinstance(score, Score) and score.value == 1.0
