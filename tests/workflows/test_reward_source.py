"""The source of rewards in a run of a workflow: the workflow's class, or the configuration."""

from pathlib import Path

import pytest

from roll_opd.commands.main import main
from roll_opd.pipelines.model_card import model_card
from roll_opd.pipelines.reward_source import rewards_from
from roll_opd.planner.build import load_plan
from roll_opd.tracking.summary import summarize

OPD = "OnPolicyDistillWorkflow"
HEAD = "import roll_opd.workflows as w\n\n\n@w.WORKFLOWS.register_module('NAME')\nclass Mine(w.BASE):\n    "
CLASSES = {
    # base, body: where the rewards come from, beside `rewards.math_rule`
    (OPD, "def compute_reward(self, response): return float(len(response.response_text))"): "workflow",
    (
        OPD,
        "def reset(self, task):\n        super().reset(task)\n    compute_reward = lambda *of: 1.0",
    ): "workflow",
    (OPD, "def compute_reward(self, response):\n        if self.truth: return 1.0"): "either",
    (
        OPD,
        "def compute_reward(self, one): return 1.0\n    def score(self, one): self.compute_reward(one)",
    ): "either",
    (OPD, "def format_messages(self): return super().format_messages()"): "configuration",
    ("SimpleWorkflow", "def format_messages(self): return super().format_messages()"): "configuration",
    ("SimpleWorkflow", "def reset(self, task):\n        super().reset(task)\n        self.reward_fn = len"): "either",
    ("Workflow", "def run(self): return self.model.chat([])"): "either",
    (
        "RewardPropagationWorkflow",
        "max_step_num = 2\n    def step(self, step_num): return False\n    def reward(self, exps): return 1.0",
    ): "workflow",
}


def written(place: Path, base: str, body: str) -> list[str]:
    name = f"rewarding_{place.name}".lower()  # of its own: modules stay imported
    (place / f"{name}.py").write_text(HEAD.replace("NAME", name).replace("BASE", base) + body + "\n")
    return ["prompt_key=messages", f"workflow={name}", f"plugin_dir={place}"]


@pytest.mark.parametrize(("base", "body"), CLASSES)
def test_where_the_rewards_of_a_users_class_come_from(base: str, body: str, tmp_path: Path) -> None:
    plan = load_plan("demo", "rlvr_opd", written(tmp_path, base, body))
    assert plan.workflow and rewards_from(plan.workflow) == CLASSES[base, body]


@pytest.mark.parametrize(
    ("words", "source"),
    [
        (["workflow=simple_workflow"], "configuration"),
        (["workflow=on_policy_distill_math_workflow"], "configuration"),  # as `rewards` are written
        (["workflow=math_workflow", "workflow_reward=math_reward"], "function"),
        (["workflow=try_again_workflow"], "workflow"),
        (["workflow=agent_workflow", "+workflow_args={command: cat}"], "either"),
    ],
)
def test_where_the_rewards_of_built_in_workflows_come_from(words: list[str], source: str) -> None:
    plan = load_plan("demo", "rlvr_opd", ["prompt_key=messages", *words])
    assert plan.workflow and rewards_from(plan.workflow) == source
    card = " ".join(model_card(plan, summarize([]), 20).split())
    assert f"| workflow | `{plan.workflow.workflow}` |" in card
    assert ("never called" in card) == (source in ("workflow", "function"))
    assert ("set by the workflow, else 1 × `math_rule`" in card) == (source == "either")


def test_plan_and_card_say_that_configured_rewards_are_not_called(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = written(tmp_path, OPD, "def compute_reward(self, response): return 2.0")
    assert main(["plan", "examples/demo/rlvr_opd.yaml", *words]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"rewards.math_rule is never called: workflow {words[1][9:]} sets the reward of every sample" in shown
    card = model_card(load_plan("demo", "rlvr_opd", words), summarize([]), 20)
    assert "| reward | of the workflow; the configured `math_rule` is never called |" in card
    assert "1 × `math_rule`" not in card


def test_the_card_of_pure_distillation_by_workflow(tmp_path: Path) -> None:
    words = written(tmp_path, OPD, "def compute_reward(self, response): return 2.0")
    card = model_card(load_plan("demo", "onpolicy_distill", words), summarize([]), 20)
    assert f"| workflow | `{words[1][9:]}` |" in card and "| reward | of the workflow" in card
    assert "(measured, not trained on)" in card
