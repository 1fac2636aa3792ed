"""A configuration started with the launcher of another pipeline: one error names the right launcher."""

from pathlib import Path
from typing import Any

import pytest

from roll_opd.base.command_line import ENTRIES
from roll_opd.base.failures import ConfigError
from roll_opd.commands.describe import to_json
from roll_opd.commands.plan_text import to_text
from roll_opd.config.schema import PIPELINES
from roll_opd.pipelines.check_user_code import check_user_code
from roll_opd.pipelines.user_code import uses_user_code
from roll_opd.planner.load_plan import load_plan

pytestmark = pytest.mark.extras

# example -> the pipelines that run it, what the plan shows, the launcher
EXAMPLES = {
    ("demo", "onpolicy_distill"): ({"distill"}, ("pure", "rlvr"), "start_onpolicy_distill_pipeline.py"),
    ("demo", "rlvr"): ({"rlvr"}, ("rl", "rlvr"), "start_rlvr_pipeline.py"),
    ("demo", "rlvr_opd"): ({"rlvr"}, ("mixed", "rlvr"), "start_rlvr_pipeline.py"),
    ("demo", "ppo"): ({"rlvr"}, ("rl", "rlvr"), "start_rlvr_pipeline.py"),
    ("demo", "sft"): ({"sft"}, ("sft", "sft"), "start_sft_pipeline.py"),
    ("demo", "dpo"): ({"dpo"}, ("dpo", "dpo"), "start_dpo_pipeline.py"),
    # as in ROLL, whose launcher of distillation plays environments too
    ("games", "frozen_lake"): ({"agentic", "distill"}, ("pure", "agentic"), "start_agentic_pipeline.py"),
    ("games", "frozen_lake_mixed"): ({"agentic"}, ("mixed", "agentic"), "start_agentic_pipeline.py"),
    ("games", "frozen_lake_reward"): ({"agentic"}, ("rl", "agentic"), "start_agentic_pipeline.py"),
}
STARTED_AS = ("distill", "rlvr", "agentic", "sft", "dpo")


def options(pipeline: str) -> dict[str, Any]:
    return ENTRIES.get(pipeline, {"pipeline": pipeline})


@pytest.mark.parametrize("example", EXAMPLES, ids="/".join)
def test_every_example_with_every_launcher(example: tuple[str, str]) -> None:
    right, (mode, kind), launcher = EXAMPLES[example]
    for pipeline in set(STARTED_AS) - right:
        with pytest.raises(ConfigError) as caught:
            load_plan(*example, **options(pipeline))
        (problem,) = caught.value.problems
        assert f"examples/{launcher}" in problem and f"runs pipeline {pipeline};" in problem and ".yaml:" in problem
    plan = load_plan(*example, **options(sorted(right)[0]), runnable=False)
    assert (to_json(plan)["mode"], to_json(plan)["pipeline"]) == (mode, kind)
    head = to_text(plan).splitlines()[0]
    shown = "distill" if (mode, kind) == ("pure", "rlvr") else kind
    assert f"{shown} pipeline" in head and ("in environments" in head) == (kind == "agentic")


def test_a_users_module_needs_keys_and_a_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a module without a package; its keys are read before the configuration is checked."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_without_keys.py").touch()
    (tmp_path / "module_without_loop.py").write_text(
        "from dataclasses import dataclass\nfrom roll_opd.config.schema import Top\n\n\n"
        "@dataclass(frozen=True, kw_only=True)\nclass Keys(Top):\n    pipeline = 'module_without_loop'\n"
    )
    with pytest.raises(ConfigError, match="module_without_keys declares no keys; write a subclass of"):
        load_plan("demo", "rlvr", pipeline="module_without_keys")
    try:
        plan = load_plan("demo", "rlvr", pipeline="module_without_loop")
    finally:
        PIPELINES.pop("module_without_loop", None)
    assert (plan.pipeline, plan.title) == ("module_without_loop", "reinforcement learning")
    assert uses_user_code(plan) and not uses_user_code(load_plan("demo", "rlvr"))
    with pytest.raises(ConfigError, match=r"module_without_loop has no `async def train\(run, workers\)`; write it"):
        check_user_code(plan)


def test_a_workflow_is_labelled_so() -> None:
    plan = load_plan("demo", "onpolicy_distill", ["workflow=simple_workflow", "prompt_key=messages"], pure=True)
    assert (to_json(plan)["mode"], to_json(plan)["pipeline"]) == ("pure", "workflow")
    assert plan.title == "pure on-policy distillation by workflow"
