"""The examples in ROLL's form can be planned on a laptop, with only the paths of models and data replaced."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from roll_assets import localise

from roll_opd.base.paths import REPOSITORY
from roll_opd.commands.plan_text import to_text
from roll_opd.config.plan import Layout, RunPlan
from roll_opd.planner.load_plan import load_plan

EXAMPLES = REPOSITORY / "examples"
DISTILL, MIXED = "qwen3-8B-onpolicy-distill-megatron", "qwen3-8B-rlvr-opd-megatron"
TAGS = {"dapo_math_17k": ["math_dapo"], "short_math": ["math_short"]}


def _plan(root: Path, directory: str, name: str, **options: bool) -> RunPlan:
    text = (EXAMPLES / directory / f"{name}.yaml").read_text()
    (root / f"{name}.yaml").write_text(localise(root, text, TAGS))
    # weights of full size are left out
    return load_plan(str(root), name, [f"output_dir={root}"], runnable=False, **options)


def test_single_teacher_example(root: Path) -> None:
    run = _plan(root, DISTILL, "onpolicy_distill_config", pure=True)
    assert (run.mode, run.num_nodes, run.sequences_per_step) == ("pure", 2, 256)
    assert run.student.layout == Layout(tp=2, dp=4, sequence_parallel=True)
    assert run.teachers[0].source.layout == Layout(tp=4, dp=2)
    assert not run.objective.recompute_old_logprobs


def test_multi_teacher_example(root: Path) -> None:
    run = _plan(root, DISTILL, "onpolicy_distill_multi_teacher_config", pure=True)
    assert [(t.name, t.opd_kl_coef, t.tags, t.source.layout) for t in run.teachers] == [
        ("teacher_32B", 1.0, ("math_dapo",), Layout(tp=2, pp=4)),
        ("teacher_14B", 0.5, ("math_short",), Layout(tp=2, dp=4)),
    ]


def test_mixed_example(root: Path) -> None:
    run = _plan(root, MIXED, "rlvr_opd_config", pure=False)
    assert (run.mode, run.extra_prompts, run.rollout.max_running_requests) == ("mixed", 16, 256)
    assert run.reference is not None
    assert run.reference.model.path == run.student.model.path
    assert run.rewards[0].query_filter is not None
    text = to_text(run)
    assert "grpo(reward, mean by group, std by group, clipped to +-10; gamma 1) - 0.5 * reverse_kl(teacher)" in text
    assert "reverse_kl(teacher), clipped to +-2\n" in text


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("qwen3-8B-*/*.sh")), ids=lambda path: path.stem)
def test_run_scripts_name_files_that_exist(script: Path) -> None:
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0
    assert os.access(script, os.X_OK)
    text = script.read_text()
    directory, name = re.findall(r"--config_(?:path|name) (\S+)", text)
    assert (REPOSITORY / directory / f"{name}.yaml").is_file()
