"""docs/extending.md: each example is added to a copy of the package and run, and is run from outside the package."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "extending.md").read_text(encoding="utf-8")
# the file that a section's code goes into, where the page names a directory and an example
FILES = {
    "A policy loss": "roll_opd/objective/losses/cubic.py",
    "An advantage": "roll_opd/objective/advantages/best_of_batch.py",
    "A reward": "roll_opd/rewards/builtin/keyword.py",
    "A tracker": "roll_opd/tracking/builtin/text.py",
}
EXAMPLES = REPOSITORY / "examples"
MODELS = EXAMPLES / "demo" / "models"


def section(title: str) -> str:
    return PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]


def code(title: str, language: str = "python") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)


def apply(diff: str, root: Path) -> str:
    """Change the one place that the context of each hunk of `diff` fits; returns the file."""
    head, *hunks = re.split(r"^@@.*\n", diff, flags=re.MULTILINE)
    file = head.splitlines()[0].removeprefix("--- a/")
    text = (root / file).read_text(encoding="utf-8")
    for lines in map(str.splitlines, hunks):
        old = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " -")
        new = "".join(f"{line[1:]}\n" for line in lines if line[:1] in " +")
        assert text.count(old) == 1, f"{file} has the lines of the page {text.count(old)} times:\n{old}"
        text = text.replace(old, new)
    (root / file).unlink()  # in a linked copy, the file of the repository stays
    (root / file).write_text(text, encoding="utf-8")
    return file


def python(root: Path, program: str, *paths: Path) -> dict:
    """Run a program that prints JSON, with `root` and then `paths` before the installed packages."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (root, *paths)))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package, its groups and its examples, to change."""
    for part in ("roll_opd", "configs", "examples"):
        shutil.copytree(REPOSITORY / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture
def linked(tmp_path: Path) -> Path:
    """The package with links to its files and their bytecode, to change single files by `apply`."""
    shutil.copytree(REPOSITORY / "roll_opd", tmp_path / "roll_opd", copy_function=os.symlink)
    for part in ("configs", "examples"):
        (tmp_path / part).symlink_to(REPOSITORY / part)
    return tmp_path


def test_the_page_counts_its_files() -> None:
    """The number of package files named in a section equals the number in the table."""
    assert [apply_to for apply_to in re.findall(r"^--- a/(\S+)", section("A key"), re.MULTILINE)] == [
        "roll_opd/config/schema/rollout_keys.py",
        "roll_opd/pipelines/run_logger.py",
    ]
    for title, file in FILES.items():
        assert len(code(title)) == 1 and f"`{Path(file).parent}/`" in section(title) and Path(file).name in PAGE


@pytest.mark.slow
def test_parts_in_the_package(copy: Path) -> None:
    for diff in code("A key", "diff"):
        ast.parse((copy / apply(diff, copy)).read_text(encoding="utf-8"))
    for title, file in FILES.items():
        (copy / file).write_text(code(title)[0], encoding="utf-8")
    program = """
import json, torch
from roll_opd.objective.registry import advantage, policy_loss
from roll_opd.objective.advantages.reward_normalisation import RewardBatch
from roll_opd.objective.losses.batch import LossBatch
from roll_opd.planner.load_plan import load_plan
from roll_opd.rewards.interface import RewardSample
from roll_opd.rewards.reward_registry import resolve
from roll_opd.tracking.tracker_registry import find

plan = load_plan("demo", "rlvr_opd", [
    "log_longest=true", "policy_loss_fn=cubic", "policy_loss_fn_args={power: 5}", "advantage_fn=best_of_batch",
    "adv_estimator=null", "track_with=[text]", "tracker_kwargs={file_name: numbers.txt}",
    "++rewards.math_rule.worker_cls=keyword", "++rewards.math_rule.word=please",
], pure=False)
objective, term = plan.objective, plan.rewards[0].terms[0]
logprobs = torch.tensor([0.5, 0.0])
batch = LossBatch(logprobs, torch.zeros(2), torch.tensor([1.0, 2.0]), torch.tensor([True, True]), (2,))
loss = policy_loss(objective.policy_loss, objective.policy_loss_args)(batch, **objective.policy_loss_args)
worth = advantage(objective.adv_estimator)(RewardBatch(torch.tensor([1.0, 3.0]).double(), ["a", "a"]))
scores = resolve(term.worker, dict(term.args))([RewardSample("1", "yes please", None, "t")])
print(json.dumps([plan.log_longest, loss.tolist(), worth.rewards.tolist(), scores[0].value, plan.trackers,
                  find("text").__name__]))
"""
    log_longest, loss, worth, score, trackers, tracker = python(copy, program)
    assert log_longest is True and (score, trackers, tracker) == (1.0, ["text"], "TextTracker")
    assert loss == pytest.approx([-(2.718281828**2.5), -2.0], rel=1e-5) and worth == [-2.0, 0.0]


@pytest.mark.slow
def test_parts_from_outside(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    for title, name in {
        "A policy loss": "my_losses",
        "An advantage": "my_advantages",
        "A reward": "my_rewards",
        "The reverse KL": "my_opd",
    }.items():
        (own / f"{name}.py").write_text(code(title)[0].replace("@register", "# @register"), encoding="utf-8")
    (own / "my_trackers.py").write_text(code("A tracker")[0].replace("@register", "# @register"), encoding="utf-8")
    row = code("An algorithm")[0].replace('"cubic", "best', '"my_losses.cubic", "my_advantages.best')
    (own / "my_rows.py").write_text(row, encoding="utf-8")
    program = """
import json, torch
from roll_opd.objective.registry import advantage, policy_loss
from roll_opd.objective.reverse_kl import advantages
from roll_opd.planner.load_plan import load_plan
from roll_opd.rewards.reward_registry import check
from roll_opd.tracking.tracker_registry import find

plan = load_plan("demo", "rlvr_opd", [
    "algorithm_type=my_rows.ROW", "adv_estimator=null", "use_kl_loss=false", "track_with=my_trackers.TextTracker",
    "++rewards.math_rule.worker_cls=my_rewards.keyword", "++rewards.math_rule.word=please",
    "opd_advantage_fn=my_opd.below", "opd_advantage_fn_args={limit: 1.5}",
], pure=False)
objective, term = plan.objective, plan.rewards[0].terms[0]
columns = {"opd_coefficients": torch.tensor([1.0, 1.0]), "opd_teacher": torch.tensor([-2.0, -3.0]),
           "advantages": torch.tensor([0.25, 0.25]), "mask": torch.tensor([True, True])}
valued, _ = advantages(torch.tensor([-1.0, -1.0]), columns, [2], objective)
policy_loss(objective.policy_loss, objective.policy_loss_args)
advantage(objective.adv_estimator, objective.advantage_args)
check(term.worker, dict(term.args))
print(json.dumps([objective.policy_loss, dict(objective.policy_loss_args), objective.adv_estimator,
                  find(plan.trackers[0]).__name__, valued.tolist()]))
"""
    assert python(REPOSITORY, program, own) == [
        "my_losses.cubic",
        {"power": 5},
        "my_advantages.best_of_batch",
        "TextTracker",
        [-0.75, 0.25],  # a reverse KL of 1, and one of 2, which is above the limit
    ]


@pytest.mark.slow
@pytest.mark.nightly  # a run; every push plans the page's other pipeline
def test_a_pipeline_runs(linked: Path, tmp_path: Path) -> None:
    directory = tmp_path / "own"
    directory.mkdir()
    shutil.copy(EXAMPLES / "pipelines/self_paced.py", directory)
    config = (EXAMPLES / "demo/sft.yaml").read_text(encoding="utf-8").replace("sft_train", "learner")
    config = config.replace("data/learner.jsonl", "data/sft_train.jsonl")
    (directory / "self_paced.yaml").write_text(config, encoding="utf-8")
    overrides = ["max_steps=2", "keep=0.25", "track_with=stdout", "eval_steps=0", f"output_dir={tmp_path}/output"]
    command = ["run", "self_paced", "--config_path", str(directory), "--config_name", "self_paced", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(linked)}
    command = [sys.executable, "-m", "roll_opd.commands.main", *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=linked)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "output/demo_sft/latest"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "self_paced/loss" in row] == [1, 2]
    assert len(list((run / "checkpoints/step_2/hf").glob("*.safetensors"))) == 1


@pytest.mark.nightly
def test_the_example_of_a_pipeline_with_a_rollout_is_planned() -> None:
    """Selected by name, with its own keys, in each mode; without the name, the plan is the usual one."""
    program = """
import json
from dataclasses import replace
from roll_opd.base.failures import ConfigError
from roll_opd.config.schema import PIPELINES
from roll_opd.planner.load_plan import load_plan
from roll_opd.commands.describe import to_json

plan = load_plan("demo", "rlvr", ["selection.best=2"], pipeline="best_and_worst")
mixed = load_plan("demo", "rlvr_opd", [], pipeline="best_and_worst")
usual = load_plan("demo", "rlvr", [], pure=False)
changed = {"pipeline", "pipeline_args", "title", "config_yaml"}
same = replace(plan, **{name: getattr(usual, name) for name in changed}) == usual
try:
    load_plan("demo", "rlvr", ["selection.bst=2"], pipeline="best_and_worst")
except ConfigError as error:
    refused = str(error)
PIPELINES["best_and_worst"].own_keys = frozenset({"selection"})
by_key = load_plan("demo", "rlvr", ["selection.best=2"])
chosen = [[one.pipeline_args["selection"].best, one.pipeline_args["selection"].worst] for one in (plan, mixed)]
print(json.dumps([plan.pipeline, to_json(plan)["pipeline"], plan.title, mixed.mode, chosen, usual.pipeline, same,
                  by_key.pipeline, refused]))
"""
    *found, refused = python(REPOSITORY, program, EXAMPLES / "pipelines")
    assert found == [
        "best_and_worst",
        "best_and_worst",
        "reinforcement learning on the best and worst answers",
        "mixed",
        [[2, 1], [1, 1]],
        "rlvr",
        True,
        "best_and_worst",
    ]
    assert "selection.bst: unknown key; did you mean 'best'?" in refused


@pytest.mark.slow
@pytest.mark.nightly
def test_a_pipeline_with_a_rollout_runs(linked: Path, tmp_path: Path) -> None:
    """With one best and one worst of four answers, half of the samples are masked."""
    command = ["-m", "roll_opd.commands.main", "run", "best_and_worst", str(EXAMPLES / "demo/rlvr.yaml")]
    command += ["rollout_batch_size=16", "actor_train.training_args.gradient_accumulation_steps=1", "max_steps=2"]
    command += ["eval_steps=0", "track_with=stdout", f"output_dir={tmp_path}/output"]
    environment = {**os.environ, "PYTHONPATH": str(linked)}
    directory = EXAMPLES / "pipelines"
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=directory)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "output/demo_rlvr/latest/metrics.jsonl").read_text().splitlines()]
    masked = {row["step"]: row["rollout/masked/best_and_worst"] for row in rows if "actor/total_loss" in row}
    assert masked == {1: 0.5, 2: 0.5}


OTHER_TEACHER = ["~teacher.strategy_args", "~teacher.device_mapping", "~teacher.use_dynamic_batching_in_infer"]
OTHER_TEACHER += ["~teacher.max_tokens_per_microbatch_in_infer"]
OTHER_TEACHER += ["+teacher.scorer={name: huggingface_teacher.HuggingFace, args: {precision: bfloat16}}"]


def test_a_teacher_kind_from_outside_is_planned() -> None:
    """It has no devices and its own row; keys of other kinds are reported, and so are wrong names and arguments."""
    program = f"""
import json
from roll_opd.base.failures import ConfigError
from roll_opd.pipelines.check_user_code import check_user_code
from roll_opd.planner.load_plan import load_plan
from roll_opd.commands.describe import to_json

def planned(*overrides):
    return load_plan("examples/demo", "onpolicy_distill", [*{OTHER_TEACHER!r}, *overrides], pure=True)

def refused(*overrides):
    try:
        check_user_code(planned(*overrides))
    except ConfigError as error:
        return str(error)

plan = planned()
check_user_code(plan)
(teacher,) = plan.teachers
print(json.dumps([teacher.source.args["precision"], teacher.role is None, to_json(plan)["roles"]["teacher"],
                  plan.warnings, planned("+teacher.infer_batch_size=3").warnings,
                  [refused("+teacher.http={{url: 'http://teacher.example:1'}}"),
                   refused("teacher.scorer.name=huggingface_teacher.Other"), refused("teacher.scorer.name=http"),
                   refused("teacher.scorer.args={{precision: half}}"), refused("teacher.scorer.args={{size: 3}}")]]))
"""
    precision, is_external, row, warnings, unread, refused = python(REPOSITORY, program, EXAMPLES / "teachers")
    assert precision == "bfloat16" and is_external
    assert row["strategy"] == "scorer, huggingface_teacher.HuggingFace" and row["devices"] == []
    assert Path(row["model"]).samefile(MODELS / "teacher")
    assert not any("teacher" in warning for warning in warnings)
    assert any("infer_batch_size" in warning for warning in unread)
    keys = ["second source", "scorer.name", "scorer.name", "scorer.args.precision", "scorer.args.size"]
    assert [key in message for key, message in zip(keys, refused, strict=True)] == [True] * 5, refused


@pytest.mark.slow
@pytest.mark.nightly
def test_a_run_with_a_teacher_kind_from_outside(linked: Path) -> None:
    shutil.copy(EXAMPLES / "teachers/huggingface_teacher.py", linked)
    command = ["-m", "roll_opd.commands.main", "run", "examples/demo/onpolicy_distill.yaml", *OTHER_TEACHER]
    command += ["max_steps=2", "eval_steps=0", "track_with=stdout", f"output_dir={linked}/output"]
    environment = {**os.environ, "PYTHONPATH": str(linked)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=linked)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (linked / "output/demo/latest/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("opd/teacher/teacher/token_share") == 1.0] == [1, 2]
