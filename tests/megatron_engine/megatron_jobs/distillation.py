"""Divergences in the loss, with teachers of other layouts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_data as data
import megatron_layouts as layouts
import numpy as np
import torch.distributed as dist
from megatron_layouts import VOCABULARY
from megatron_ranks import Job, held, meet_anew, trainer_of, write_json
from megatron_registry import jobs, operation
from megatron_samples import TeacherTargets, updated

from roll_opd.config.plan import MegatronPlan, MicroBatchLimits, ModelPlan, ObjectivePlan
from roll_opd.megatron import parallel
from roll_opd.megatron.engine import MegatronEngine, TargetRequest
from roll_opd.megatron.export import save_hf

# one update each, with two teachers for some samples: what a divergence in the loss can be
DISTILLING = [
    ObjectivePlan(opd_vocab_size=VOCABULARY, opd_objective="full", adv_estimator="grpo", entropy_loss_coef=0.02),
    ObjectivePlan(
        opd_vocab_size=VOCABULARY,
        opd_objective="topk",
        opd_topk=5,
        opd_divergence="skewed_reverse_kl",
        opd_skew_alpha=0.2,
    ),
    ObjectivePlan(
        opd_vocab_size=VOCABULARY,
        opd_objective="full",
        opd_divergence="jsd",
        opd_jsd_beta=0.3,
        loss_agg_mode="seq-mean-token-mean",
    ),
    ObjectivePlan(opd_vocab_size=VOCABULARY, opd_objective="topk", opd_topk=VOCABULARY),
]
TEACHERS = {"wide": 0.7, "llama": 0.4}  # model -> coefficient; "wide" pads its vocabulary further than the student
# layout of the student -> that of the teachers
TEACHER_LAYOUTS = {
    "tp1": "tp1",
    "tp2": "pp2",
    "pp2": "tp2sp",
    "dp2": "tp2",
    "cp2": "cp2",
    "tp2pp2": "tp2dp2",
    "tp2dp2": "pp2cp2",
    "cp2dp2": "tp2pp2",
}


def looks_at(teacher: str, sample: int) -> bool:
    """Return the teachers of a sample: every third sample has both, the others have one."""
    return sample % 3 != list(TEACHERS).index(teacher)


@operation
def distil(job: Job, root: Path) -> None:
    """Run one update for every kind of divergence in the loss; teachers with other layouts score first."""
    samples = [data.train_samples(step, "opd") for step in range(len(DISTILLING))]
    layout = layouts.LAYOUTS[TEACHER_LAYOUTS[job["layout"]]]
    targets: list[list[dict[str, TeacherTargets]]] = [[{} for _ in batch] for batch in samples]
    heads = {}
    for name, coefficient in TEACHERS.items():
        devices = tuple(range(layout.world_size))
        model = ModelPlan(layouts.model_path(root, name))
        limits = MicroBatchLimits(tokens=120)
        plan = MegatronPlan(name, model, devices, layout, limits, vocab_size=layouts.VOCABULARY)
        engine = MegatronEngine(plan, seed=0)
        heads[name] = one_of(engine.output_head())
        try:  # the wider teacher has a logit for this token, but it is not in the softmax
            engine.compute_logprobs([(np.array([1, layouts.VOCABULARY]), 1)], 1.0)
        except ValueError as error:
            assert f"token {layouts.VOCABULARY} has no log-prob" in str(error)
        else:
            raise RuntimeError("a token outside the softmax has a log-prob")
        for step, objective in enumerate(DISTILLING):
            numbers = [n for n in range(len(samples[step])) if looks_at(name, n)]
            sequences = [(samples[step][n].tokens, samples[step][n].prompt_length) for n in numbers]
            full = objective.opd_objective == "full"
            request = TargetRequest(None if full else objective.opd_topk, hidden=full, vocab_size=layouts.VOCABULARY)
            for place, values in everything(engine.compute_targets(sequences, data.TEMPERATURE, request)).items():
                logprobs = values.pop("logprobs")
                if objective.opd_topk == layouts.VOCABULARY:  # a wider teacher is normalised over the student's ids
                    tokens, prompt = sequences[place]
                    same = values["topk_ids"] == tokens[prompt:, None]
                    np.testing.assert_allclose(logprobs, values["topk_logprobs"][same], rtol=0, atol=1e-5)
                targets[step][numbers[place]][name] = TeacherTargets(coefficient, values)
        ids = [targets[3][n][name].arrays["topk_ids"] for n in numbers]
        request = TargetRequest(ids=ids, vocab_size=layouts.VOCABULARY)
        again = everything(engine.compute_targets(sequences, data.TEMPERATURE, request))
        for place, values in again.items():
            before = targets[3][numbers[place]][name].arrays
            if not all(np.array_equal(values[key], before[key]) for key in ("topk_logprobs", "topk_rest")):
                raise RuntimeError("the same tokens have other log-probs when they are asked for")
        parallel.shutdown()
        meet_anew(root / f"port-{job['name']}-{name}")
    trainer = trainer_of({**job, "model": "qwen3_tied"}, root, data.optimizer_plan(True), MicroBatchLimits(tokens=70))
    for name, head in heads.items():
        trainer.load_teacher_head(name, head)
    records = []
    for batch, teachers, objective in zip(samples, targets, DISTILLING, strict=True):
        batch = [replace(sample, teachers=of_sample) for sample, of_sample in zip(batch, teachers, strict=True)]
        result = updated(trainer, batch, objective, data.TEMPERATURE)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, result.sums)
        loss = sum(sums.get("weighted_loss", 0.0) for sums in everyone)
        records.append({"loss": loss, "grad_norm": result.grad_norm, "applied": result.applied})
    write_json(root / f"{job['name']}.json", records)
    save_hf(trainer, root / f"{job['name']}.hf")
    held(trainer, job, root)


def one_of(value: Any) -> Any:
    """Return the value of the only rank that has one."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, value)
    (found,) = (share for share in shares if share is not None)
    return found


def everything(mine: dict | None) -> dict:
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, mine)
    return {number: values for share in shares for number, values in (share or {}).items()}


@jobs
def distillation_jobs() -> Iterator[Job]:
    for layout in TEACHER_LAYOUTS:
        yield {"op": "distil", "name": f"distil-{layout}", "layout": layout}
