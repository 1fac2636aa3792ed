"""Generation ahead of training with every mode and objective, in a few steps each."""

import json
from dataclasses import dataclass

import pytest
from ahead_checks import ahead, check_ahead
from runs import REPOSITORY
from stage import CRITIC_SCHEDULE, PURE, REFERENCE, SHORT, WITH_CRITIC, WITH_REWARD, WITH_TEACHER, Stage, optimizer_of
from test_rewarded_runs import TEACHERS
from test_staged_runs import DEMONSTRATIONS

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
    bound: float = 1
    depth: float | None = None
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
    "fraction": Case(PURE, bound=0.5),
    "full": Case(PURE, ("opd_objective=full", "opd_divergence=reverse_kl")),
    "topk of the teacher": Case(PURE, TOPK, bound=2),
    "topk of the student": Case(PURE, (*TOPK, "opd_topk_source=student"), bound=2),
    "validated": Case(PURE, VALIDATED),
    "grpo": Case(WITH_REWARD, (TIS,), bound=2, depth=1, on_update="restart"),
    "filtered": Case(WITH_REWARD, (ICEPOP, STD_FILTER), bound=2, depth=0.5),
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
