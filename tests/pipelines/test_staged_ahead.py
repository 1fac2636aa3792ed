"""Async rollouts with every mode, objective and kind of rollout, in a few steps each."""

import json
from dataclasses import dataclass

import pytest
import torch
from ahead_checks import ahead, check_ahead
from runs import REPOSITORY, Run
from safetensors.torch import load_file
from stage import CRITIC_SCHEDULE, PURE, REFERENCE, SHORT, WITH_CRITIC, WITH_REWARD, WITH_TEACHER, Stage, optimizer_of
from test_rewarded_runs import TEACHERS
from test_staged_environments import settings_of
from test_staged_runs import DEMONSTRATIONS

from roll_opd.tracking.audit import audit
from tests.cover import tiered

STEPS, PROMPTS, RUNS = 4, 8, 4
TIS = "+train_infer_correction={is_weight: {enabled: true}}"
ICEPOP = "+train_infer_correction={is_weight: {enabled: true, method: icepop}}"
FILTERS = "+train_infer_correction={filters: [{enabled: true, agg_type: sequence, ratio_low: 0.1, ratio_high: 10}]}"
STD_FILTER = "rewards.math_rule.query_filter_config={type: std_filter, filter_args: {std_threshold: 0.0}}"
TWO_TEACHERS = ("~teacher", *TEACHERS, "allow_self_teacher=true", "rewards.math_rule.tag_included=[odd,even]")
TOPK = ("opd_objective=topk", "opd_topk=8")
VALIDATED = ("validation={data_args: {file_name: examples/demo/data/val.jsonl}}", "eval_steps=2")


@dataclass(frozen=True)
class Case:
    """Configuration and settings of a run; `bound` and `depth` in batches."""

    config: tuple[str, str]
    settings: tuple[str, ...] = ()
    bound: int = 1
    depth: int | None = None
    on_update: str = "continue"

    @property
    def role(self) -> str:
        return "student_train" if self.config == PURE else "actor_train"

    def overrides(self) -> tuple[str, ...]:
        batch = PROMPTS * RUNS
        return (
            *SHORT,
            *optimizer_of(self.role),
            f"rollout_batch_size={PROMPTS}",
            f"{self.role}.training_args.per_device_train_batch_size={batch}",
            f"logged_samples_per_step={8 * batch}",
            f"max_steps={STEPS}",
            "save_steps=2",
            "max_ckpt_to_keep=0",
            *ahead(self.bound, self.depth, self.on_update),
            *self.settings,
        )


CASES = {
    "sampled": Case(PURE, bound=2, depth=1),
    "full": Case(PURE, ("opd_objective=full", "opd_divergence=reverse_kl")),
    "topk of the teacher": Case(PURE, TOPK, bound=2),
    "topk of the student": Case(PURE, (*TOPK, "opd_topk_source=student"), bound=2),
    "validated": Case(PURE, VALIDATED),
    "grpo": Case(WITH_REWARD, (TIS,), bound=2, depth=1),
    "filtered": Case(WITH_REWARD, (ICEPOP, STD_FILTER), bound=2, depth=1),
    "reference": Case(WITH_REWARD, (FILTERS, REFERENCE, "use_kl_loss=true", "kl_loss_coef=0.1")),
    "token-level KL": Case(WITH_REWARD, (TIS, REFERENCE, "add_token_level_kl=true", "init_kl_coef=0.05")),
    "two updates": Case(WITH_REWARD, (TIS, "actor_train.training_args.per_device_train_batch_size=16")),
    "demonstrations": Case(
        WITH_REWARD, (TIS, "use_kl_loss=false", "~adv_estimator", "+algorithm_type=mix", DEMONSTRATIONS), bound=2
    ),
    "critic": Case(
        WITH_CRITIC,
        (TIS, CRITIC_SCHEDULE, "critic.training_args.per_device_train_batch_size=32", "critic_warmup=1"),
        bound=2,
    ),
    "mixed": Case(WITH_TEACHER, (TIS,), bound=2, depth=1, on_update="wait"),
    "mixed and topk": Case(WITH_TEACHER, (TIS, *TOPK)),
    "two teachers": Case(WITH_TEACHER, (TIS, *TWO_TEACHERS), bound=2, depth=1),
}


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Rows with the tags of two teachers."""
    place = tmp_path_factory.mktemp("rows") / "tagged.jsonl"
    rows = [json.loads(line) for line in (REPOSITORY / "examples/demo/data/train.jsonl").read_text().splitlines()]
    place.write_text("".join(json.dumps({**row, "tag": ("even", "odd")[n % 2]}) + "\n" for n, row in enumerate(rows)))
    return f"actor_train.data_args.file_name={place}"


@pytest.mark.parametrize("name", tiered(CASES, ["filtered"]))
def test_every_kind_of_run_keeps_bound_and_ledger(stage: Stage, tagged: str, name: str) -> None:
    case = CASES[name]
    run = stage.run(*case.overrides(), *([tagged] if name == "two teachers" else []), config=case.config, name="ahead")
    check_ahead(run, case.bound, PROMPTS, STEPS)
    for row in run.rows("metrics.jsonl")[1:]:
        assert {TIS, ICEPOP}.isdisjoint(case.settings) or row["rollout/correction/weight_mean"] > 0
    if name == "filtered":
        assert any(entry["filtered"] for entry in run.rows("ledger.jsonl"))


FEW_GAMES = (
    "rollout_batch_size=8",
    "train_env_manager={tags: [Game], num_env_groups: 4, group_size: 2}",
    "actor_train.training_args.per_device_train_batch_size=8",
)


@pytest.fixture(scope="module")
def agents(games: str, mine: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return the settings of runs with a game and with workflows."""
    *plugins, rows = mine
    whole = ("logged_samples_per_step=256", "save_steps=2", "max_ckpt_to_keep=0", f"max_steps={STEPS}", TIS)
    data = f"actor_train.data_args.file_name={rows.partition('=')[2]}"
    of_workflow = (*Case(WITH_REWARD).overrides(), *plugins, data)
    found = {
        kind: (*of_workflow, f"workflow={name}", "response_length=200", *whole)
        for kind, name in {"conversation": "talk", "clients": "clients"}.items()
    }
    rewards = "reward_normalization={grouping: traj_group_id, method: mean_std}"
    return found | {
        "single": (*of_workflow, "workflow=rewarded", "prompt_key=question", *whole),
        "game": (*settings_of(games, "sums", "actor_train"), "rollout_batch_size=32", rewards, *whole),
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["game", "conversation", "clients", "single"])
def test_runs_with_games_and_workflows_keep_bound_and_ledger(stage: Stage, agents: dict, name: str) -> None:
    """Weights may change between the turns of a run."""
    config = WITH_TEACHER if name == "clients" else WITH_REWARD  # these answers are all of one length and reward
    run = stage.run(*agents[name], *ahead(2, 1), config=config, name=f"ahead_{name}")
    check_ahead(run, 2, PROMPTS, STEPS)
    for row in run.rows("metrics.jsonl")[1:]:
        assert not any(key.startswith("workflow/failed") for key in row)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["filtered", "game"])
def test_a_deterministic_run_is_replayed_from_its_checkpoint(stage: Stage, agents: dict, name: str) -> None:
    """With filters and games: the same draws, versions, tokens and weights.

    There are few games: a deterministic engine answers one request of a game at a time.
    """
    replayed = ("deterministic=true", "async_generation_ratio=1", "async_depth=1")
    of_case, config, prompts = CASES["filtered"].overrides(), WITH_REWARD, PROMPTS
    if name == "game":
        of_case, config, prompts = (*agents[name], *FEW_GAMES), WITH_TEACHER, 4
    settings = (*(text for text in of_case if not text.startswith("on_weight_update")), *replayed)

    def contents(run: Run) -> tuple:
        samples = sorted((s["step"], s["id"], s["tokens"], s["versions"]) for s in run.rows("samples.jsonl"))
        return samples, run.rows("ledger.jsonl"), load_file(run.path / f"checkpoints/step_{STEPS}/hf/model.safetensors")

    name = f"replayed_{name}"
    run = stage.run(*settings, config=config, name=name)
    check_ahead(run, 1, prompts, STEPS)
    one = contents(run)
    again = stage.run(*settings, f"resume_from_checkpoint={run.path}/checkpoints/step_2", config=config, name=name)
    assert again.code == 0 and again.path == run.path and audit(again.path)[1] == []
    other = contents(again)
    assert one[0] == other[0] and one[1] == other[1]
    assert all(torch.equal(one[2][key], other[2][key]) for key in one[2])
