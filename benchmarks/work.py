"""Work of the phases of a step, independent of the engines: model FLOPs, and the minimum of bytes.

Counted from config.json and the token counts of a step's metrics; FLOPs as in `roll_opd.models.flops`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from roll_opd.config.plan import RunPlan
from roll_opd.models.flops import TRAINED, forward_flops, keys_seen, sequence_flops, used_parameters
from roll_opd.models.model_info import ModelInfo, read_model

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
CONCURRENT = 256  # concurrent sequences of an engine without max_num_seqs
GRADIENT, STATE = 8, 24  # bytes per parameter and update, written and read: f32 gradient; f32 weight and moments


class UncountedError(ValueError):
    """The work of this run cannot be counted; the message states the reason."""


@dataclass(frozen=True)
class Work:
    """Work of one phase of one step, over all devices."""

    flops: float
    bytes: float  # minimum traffic of reads and writes to memory


def check_counted(plan: RunPlan) -> None:
    """Raise UncountedError for a run whose phases include work that `phase_work` does not count."""
    if len(plan.teachers) != 1 or plan.num_nodes != 1 or plan.rollout is None:
        raise UncountedError("only one teacher on one node can be measured; choose such a configuration")
    if plan.objective.opd_objective != "sampled" or plan.reference or plan.critic or plan.demonstrations:
        raise UncountedError("only pure distillation with opd_objective: sampled can be measured")


def phase_work(plan: RunPlan, row: Mapping[str, float]) -> dict[str, Work]:
    """Return the work of each phase of the step with the metrics `row`. Call `check_counted` before.

    Lengths are the step's means, so that the count for attention is slightly too low if lengths differ. Generation
    counts a prompt once for all of its answers, and the smallest number of token steps that the engines' limits allow.
    """
    assert plan.rollout is not None
    student, teacher = (read_model(Path(worker.model.path)) for worker in (plan.student, plan.frozen_roles()[0]))
    sequences = plan.sequences_per_step
    prompt, response = row["tokens/prompt_length/mean"], row["tokens/response_length/mean"]
    length = prompt + response
    work = {"generate": _generate(plan, student, prompt, response, row["tokens/response_length/max"])}
    for name, model, worker in (("teacher", teacher, plan.frozen_roles()[0]), ("old_logprobs", student, plan.student)):
        copies = worker.layout.dp * worker.layout.cp
        flops = sequences * sequence_flops(model, length, response)
        work[name] = Work(flops, copies * _weight_bytes(model, worker.model.dtype))
    if not plan.objective.recompute_old_logprobs:
        del work["old_logprobs"]
    epochs, copies = plan.objective.ppo_epochs, plan.student.layout.dp * plan.student.layout.cp
    updates = epochs * math.ceil(sequences / plan.student.mini_batch_sequences)
    weights = _weight_bytes(student, plan.student.model.dtype)
    each_update = copies * (2 * weights + GRADIENT * student.parameters) + STATE * student.parameters
    trained = epochs * TRAINED * sequences * sequence_flops(student, length, response)
    work["train"] = Work(trained, updates * each_update)
    sent = DTYPE_BYTES[plan.student.model.dtype] * student.parameters
    work["weight_sync"] = Work(0.0, sent * (1 + plan.rollout.engines))  # read once, written by every engine
    return work


def _generate(plan: RunPlan, model: ModelInfo, prompt: float, response: float, longest: float) -> Work:
    rollout = plan.rollout
    assert rollout is not None
    prompts, sequences = plan.rollout_batch_size, plan.sequences_per_step
    later = response - 1  # tokens of an answer that the model processes: all but the last

    def keys(window: int) -> float:
        return prompts * keys_seen(0, prompt, window) + sequences * keys_seen(prompt, prompt + later, window)

    flops = forward_flops(model, prompts * prompt + sequences * later, keys, prompts + sequences * later)
    of_each = math.ceil(sequences / rollout.engines)
    at_once = min(of_each, rollout.engine_args.get("max_num_seqs") or CONCURRENT)
    steps = max(longest, of_each * response / at_once)
    size = DTYPE_BYTES[rollout.model.dtype]
    key_bytes = model.cached_elements(1) * size * sequences * keys_seen(prompt, prompt + later)
    return Work(flops, rollout.engines * steps * _weight_bytes(model, rollout.model.dtype) + key_bytes)


def _weight_bytes(model: ModelInfo, dtype: str) -> float:
    """Return the bytes of weights that a forward pass reads."""
    return DTYPE_BYTES[dtype] * (used_parameters(model) + model.hidden * model.vocab)


def phase_devices(plan: RunPlan) -> dict[str, tuple[set[int], str]]:
    """Return the devices that each phase may use, and the dtype that it computes in."""
    assert plan.rollout is not None
    student, teacher, rollout = plan.student, plan.frozen_roles()[0], plan.rollout
    return {
        "generate": (set(rollout.devices), rollout.model.dtype),
        "teacher": (set(teacher.devices), teacher.model.dtype),
        "old_logprobs": (set(student.devices), student.model.dtype),
        "train": (set(student.devices), student.model.dtype),
        "weight_sync": ({*student.devices, *rollout.devices}, student.model.dtype),
    }
