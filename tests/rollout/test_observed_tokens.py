"""Observed tokens (of tools, environments, users) affect no advantage, weight, mask or recorded number.

Complete outputs are compared for the same samples with and without extreme numbers at their observed tokens. So outputs
that are added later are also covered.
"""

import asyncio
import json
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from teacher_assets import megatron, teacher_with

from roll_opd.base.paths import REPOSITORY
from roll_opd.config.plan import (
    CorrectionPlan,
    Layout,
    MegatronPlan,
    MicroBatchLimits,
    ModelPlan,
    ObjectivePlan,
    SamplingPlan,
    TeacherPlan,
    TokenFilterPlan,
)
from roll_opd.data.templates import load_tokenizer
from roll_opd.objective.columns import loss_columns, with_total_advantages
from roll_opd.objective.corrections import corrected, train_infer_metrics
from roll_opd.objective.external_advantages import external_advantages
from roll_opd.objective.filters import mask_metrics, masked
from roll_opd.objective.reference_kl import kl_coefs
from roll_opd.pipelines.run_logger import RunLogger
from roll_opd.samples.micro_batches import Packing, ShardedBatch
from roll_opd.samples.sample import Sample, TargetRef, as_columns, teacher_columns
from roll_opd.teachers.logprob_checks import Check
from roll_opd.teachers.teacher_preflight import TeacherPreflight
from roll_opd.tracking.console import Console, progress_line
from roll_opd.tracking.reward_metrics import reward_metrics
from roll_opd.tracking.run_directory import METRICS, SAMPLES, VALIDATION_SAMPLES, RunDirectory, read_jsonl
from roll_opd.tracking.sample_metrics import advantage_metrics, opd_metrics
from roll_opd.tracking.summary import write_summary
from roll_opd.tracking.validation_metrics import validation_metrics
from roll_opd.workers.critic import value_metrics

TEACHERS = [
    TeacherPlan(name, MegatronPlan(name, ModelPlan("m"), (0,), Layout(), MicroBatchLimits()), weight)
    for name, weight in (("one", 0.7), ("other", 0.3))
]
CORRECTION = CorrectionPlan(
    weight="tis", high=2.0, filters=(TokenFilterPlan("ratio", "token", 0.5, 2.0),), negatives_delta=0.1
)
LEARNED = ("advantages", "opd_teacher", "opd_coefficients")  # columns that tokens are weighted with
OBJECTIVES = {
    "pure": (ObjectivePlan(), TEACHERS),
    "mixed": (ObjectivePlan(adv_estimator="grpo", opd_kl_discount=0.9, init_kl_coef=0.1), TEACHERS),
    "corrected": (ObjectivePlan(adv_estimator="grpo", correction=CORRECTION, max_len_mask=True), TEACHERS),
    "rl": (ObjectivePlan(adv_estimator="step_wise_grpo", init_kl_coef=0.2), []),
}


def conversations(seed: int) -> list[Sample]:
    """Two prompts, three runs each, of one or two conversations with something observed in the middle of each."""
    rng = np.random.default_rng(seed)
    found = []
    for group in "ab":
        for run in range(3):
            for step in range(int(rng.integers(1, 3))):
                written, seen, last = rng.integers(1, 5, 3)
                mask = np.repeat([True, False, True], [written, seen, last])
                length = len(mask)

                def draw(length: int = length) -> np.ndarray:
                    return -rng.random(length).astype(np.float32)

                found.append(
                    Sample(
                        id=f"{group}/{run}.{step}",
                        group_id=group,
                        run=run,
                        step=step,
                        tag="t",
                        domain="math",
                        tokens=np.array([len(found), 7, *rng.integers(97, 123, length)]),
                        prompt_length=2,
                        finish_reason="stop",
                        reward=float(rng.random()),
                        teacher_targets={"one": TargetRef(None, 0, {}, hits=rng.random(length) < 0.5)},
                        columns=as_columns(
                            action_mask=mask,
                            rollout_logprobs=draw(),
                            old_logprobs=draw(),
                            ref_logprobs=draw(),
                            values=draw(),
                            returns=draw(),
                            **teacher_columns({"one": draw(), "other": draw()}),
                        ),
                    )
                )
    return found


def disturbed(experience: Sample, rng: np.random.Generator) -> Sample:
    """Add 100 to the log-probs of every observed token, or take it away."""

    def other(logprobs: np.ndarray) -> np.ndarray:
        wild = logprobs + rng.choice([-100, 100], len(logprobs)).astype(np.float32)
        return np.where(experience.action_mask, logprobs, wild).astype(np.float32)

    (name, held) = next(iter(experience.teacher_targets.items()))
    hits = np.where(experience.action_mask, held.hits, rng.random(len(held.hits)) < 0.5)
    return replace(experience, teacher_targets={name: replace(held, hits=hits)}).with_columns(
        values=other(experience.values),
        returns=other(experience.returns),
        rollout_logprobs=other(experience.rollout_logprobs),
        old_logprobs=other(experience.old_logprobs),
        ref_logprobs=other(experience.ref_logprobs),
        **teacher_columns({name: other(logprobs) for name, logprobs in experience.teacher_logprobs.items()}),
    )


def worked_on(
    experiences: list[Sample], objective: ObjectivePlan, teachers: list[TeacherPlan]
) -> tuple[list[Sample], dict[str, float]]:
    """Return the samples that the driver makes from a step's experiences, and its metrics."""
    if not teachers:
        experiences = [one.with_columns(**dict.fromkeys(teacher_columns(one.teacher_logprobs))) for one in experiences]
    experiences = masked(experiences, objective, SamplingPlan(max_new_tokens=8))
    experiences = external_advantages(experiences, objective, 0.1, taught=bool(teachers))
    *_, kl_coef = kl_coefs(experiences, objective, 0.1)
    if objective.correction:
        experiences = corrected(experiences, teachers, objective)
    metrics = train_infer_metrics(experiences) | opd_metrics(experiences) | reward_metrics(experiences)
    experiences = with_total_advantages(experiences, teachers, objective)
    metrics |= mask_metrics(experiences) | advantage_metrics(experiences, objective)
    return experiences, metrics | {"kl_coef": kl_coef}


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("seed", range(5))
def test_observed_tokens_change_nothing(name: str, seed: int) -> None:
    objective, teachers = OBJECTIVES[name]
    experiences, rng = conversations(seed), np.random.default_rng(seed)
    plain, metrics = worked_on(experiences, objective, teachers)
    wild, wild_metrics = worked_on([disturbed(one, rng) for one in experiences], objective, teachers)
    assert wild_metrics == metrics and len(metrics) > 20
    for one, other in zip(plain, wild, strict=True):
        for array in ("advantages", "loss_mask", "importance_weights"):
            values = [getattr(experience, array) for experience in (one, other)]
            if values[0] is not None:
                np.testing.assert_array_equal(*[value[one.action_mask] for value in values])
            assert values[0] is not None or values[1] is None


DEMO = REPOSITORY / "examples/demo/models"
PLAIN = "prompts that are plain texts"


class Ranks:
    """A role's ranks that answer with random log-probs, wild ones at observed tokens."""

    packing, plan = Packing(ranks=1), megatron(DEMO / "student")

    def __init__(self, seed: int, experiences: list[Sample], wild: bool) -> None:
        self._seed, self._wild = seed, wild
        self._by_token = {int(e.tokens[0]): e for e in experiences}

    async def scatter(
        self, method: str, sharded: ShardedBatch, temperature: float, **wanted: Any
    ) -> list[tuple[int, Any]]:
        assert method == "compute_targets"
        (shard,) = sharded.shards
        samples: Any = shard.samples
        return [(0, {n: self._answer(samples._value[n], wanted) for part in shard.micro_batches for n in part})]

    def _answer(self, sample: Sample, wanted: dict[str, Any]) -> dict[str, np.ndarray]:
        tokens, scored_from = sample.tokens, sample.prompt_length
        of = self._by_token[int(tokens[0])]
        rng = np.random.default_rng([self._seed, int(tokens[0])])
        length = len(of.tokens) - 1
        logprobs = np.log(rng.dirichlet(np.full(wanted["vocab_size"], 0.1), length) + 1e-30)
        if self._wild:
            observed = np.flatnonzero(np.concatenate([np.zeros(of.prompt_length - 1, bool), ~of.action_mask]))
            logprobs[observed] += np.random.default_rng().choice([-100, 100], (len(observed), 1))
        logprobs = logprobs.astype(np.float32)[scored_from - 1 : len(tokens) - 1]
        ids = np.argsort(-logprobs, 1)[:, : wanted["topk"]].astype(np.int32)
        top = np.take_along_axis(logprobs, ids, 1)
        sampled = np.take_along_axis(logprobs, tokens[scored_from:, None], 1)[:, 0]
        return {"logprobs": sampled, "topk_ids": ids, "topk_logprobs": top, "plain_logprobs": top}


def preflight_of(experiences: list[Sample], wild: bool) -> list[dict[str, Any]]:
    rows: list[Check] = []
    student, ranks = (Ranks(seed, experiences, wild) for seed in (1, 2))
    teacher_plan = replace(TEACHERS[0], source=megatron(DEMO / "teacher"))
    group: Any = student
    teachers = (teacher_with(ranks, 320, teacher_plan),)
    preflight = TeacherPreflight("warn", group, teachers, lambda _, found: rows.extend(found), plain_prompts=PLAIN)
    asyncio.run(preflight.check(experiences, 1.0))
    return [asdict(row) for row in rows]


def recorded(
    experiences: list[Sample], metrics: dict[str, float], objective: ObjectivePlan, teachers: Any, path: Path
) -> dict[str, Any]:
    """Return the files, the report and the console lines of a run of two steps with these samples."""
    path.mkdir(parents=True)
    run = RunDirectory(path)
    run.write_config("exp_name: game\nmax_steps: 2\n")
    logger = RunLogger.__new__(RunLogger)
    plan: Any = SimpleNamespace(teachers=teachers, advantage_teachers=teachers, objective=objective)
    logger._plan, logger._run, logger.tokenizer = plan, run, load_tokenizer(str(DEMO / "student"))
    logger._other_tokenizers, logger._console = {}, Console(2, frozen="teacher")
    taught = replace(objective, opd_topk_source="teacher")
    logger._plan.objective = taught
    for step in (1, 2):
        run.append_jsonl(METRICS, [{"step": step, **metrics}])
        run.append_jsonl(SAMPLES, logger._samples(step, experiences))
        logger.answers(step, "student", [replace(e, id=f"Lake/1#{n}/0") for n, e in enumerate(experiences)])
    summary = write_summary(run, seed=1)
    files = {name: (path / name).read_text() for name in (METRICS, SAMPLES, VALIDATION_SAMPLES)}
    return {
        "files": files,
        **pages(run),
        "summary": summary,
        "line": progress_line(1, 2, metrics, 1.0, width=200),
    }


def pages(run: RunDirectory) -> dict[str, Any]:
    """The texts that extras make from the files of a run."""
    if find_spec("roll_opd.extras") is None:
        return {}
    game, page, files = (
        import_module(f"roll_opd.extras.{name}")
        for name in ("games.before_and_after", "report.page", "report.run_files")
    )
    report = page.contents(files.read_run(run.path))
    del report["made"], report["facts"]
    return {"report": report, "game": game.before_and_after(read_jsonl(run.path / VALIDATION_SAMPLES))}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_no_number_on_record_is_of_an_observed_token(name: str, tmp_path: Path) -> None:
    """Preflight, metrics, console, samples, validation, summary and report do not depend on observed tokens."""
    objective, teachers = OBJECTIVES[name]
    experiences, rng = conversations(3), np.random.default_rng(3)
    if not teachers:
        experiences = [one.with_columns(**dict.fromkeys(teacher_columns(one.teacher_logprobs))) for one in experiences]
    outputs = []
    for wild in (False, True):
        given = [disturbed(one, rng) for one in experiences] if wild else experiences
        made, metrics = worked_on(given, objective, teachers)
        metrics |= validation_metrics(given, 3) | value_metrics(given)
        trained = loss_columns(made, teachers, objective)
        learned = [
            [one.acted(a).tolist() for a in (t.columns[name] for name in LEARNED)]
            for one, t in zip(made, trained, strict=True)
        ]
        outputs.append(
            {
                "metrics": metrics,
                "learned": learned,
                "tokens": [one.learned_tokens for one in made],
                "preflight": preflight_of(given, wild) if teachers else [],
                **recorded(made, metrics, objective, teachers, tmp_path / str(wild) / "run"),
            }
        )
    plain, wild_ones = (json.loads(json.dumps(output)) for output in outputs)
    for part in plain:
        assert wild_ones[part] == plain[part], part
    checks = {row["check"]: row for row in plain["preflight"]}
    assert len(plain["metrics"]) > 20 and ("report" not in plain or (plain["report"]["samples"] and plain["game"]))
    assert not teachers or ("mean log-prob, samples" in checks and plain["report"]["agreement"])
    assert not teachers or (checks["prompts"]["verdict"], checks["prompts"]["meaning"]) == ("warning", PLAIN)


@pytest.mark.parametrize("seed", range(3))
def test_learned_tokens_are_the_action_tokens_in_the_loss(seed: int) -> None:
    """Action tokens in the loss, one by one: not those that a mask, a correction or a failed reward leaves out."""
    rng = np.random.default_rng(seed)
    for one in conversations(seed):
        loss_mask = rng.random(len(one.action_mask)) < 0.5
        masked_one = one.with_columns(loss_mask=loss_mask)
        count = sum(bool(a) and bool(m) for a, m in zip(one.action_mask, loss_mask, strict=True))
        assert one.learned_tokens == sum(map(bool, one.action_mask)) < one.response_length
        assert masked_one.learned_tokens == count and replace(masked_one, excluded=True).learned_tokens == 0
