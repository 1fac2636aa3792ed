"""Checks of async rollouts: devices, depth, and the correction of stale samples."""

import os

from roll_opd.base import hardware
from roll_opd.config.schema import Top
from roll_opd.planner.device_mapping import short_devices
from roll_opd.planner.objective_plan import read_correction
from roll_opd.planner.validate_sections import Sections

KEY = "async_generation_ratio"
ADVICE = "train_infer_correction: {is_weight: {enabled: true}} (truncated importance weights), or filters"


def check_async(top: Top, roles: Sections) -> None:
    """Check the async keys.

    Stale samples need a correction if they have a reward. Engines must not take turns with another role on their
    devices.
    """
    if not top.async_generation_ratio:
        return
    if top.async_depth is not None and top.async_depth > top.async_generation_ratio:
        top.diag.error(
            "async_depth",
            f"{top.async_depth} is more than {KEY} {top.async_generation_ratio}, the bound of the samples' age; lower"
            f" it, or raise {KEY}",
        )
    if top.is_use_additional_prompts:
        top.diag.note(
            "is_use_additional_prompts", f"has no effect with {KEY}: prompts generated ahead replace rejected prompts"
        )
    if top.deterministic and "on_weight_update" in top.written and top.on_weight_update != "wait":
        top.diag.error(
            "on_weight_update",
            f"{top.on_weight_update} makes samples depend on timing, but deterministic is true; write wait, or remove"
            " this key",
        )
    _check_devices(top, roles)
    _check_correction(top, roles.mode)


def check_validation_engines(top: Top, engines: int, *, validates: bool, has_auxiliaries: bool) -> None:
    """Check the number of engines that are reserved for validation.

    Args:
        engines: number of the student's engines.
        validates: whether the run has validations.
        has_auxiliaries: whether its workflow has auxiliary models.
    """
    reserved = top.validation_engines
    if not reserved:
        return
    if not top.async_generation_ratio:
        why = f"{KEY} is 0, so training waits for each validation; raise {KEY}"
    elif not validates:
        why = "the run has no validation; write validation and eval_steps"
    elif reserved >= engines:
        why = f"all {engines} engines would be reserved, and none would generate for training; add engines, lower it"
    elif has_auxiliaries:
        why = "engines of auxiliary_models cannot be reserved; remove auxiliary_models"
    else:
        return
    top.diag.error("validation_engines", f"{reserved}: {why}, or remove validation_engines")


def _check_devices(top: Top, roles: Sections) -> None:
    """Refuse engines that would have to take turns with another role on the same devices."""
    on_gpu = hardware.has_gpu_driver() or bool(os.environ.get("RAY_ADDRESS"))
    takes_turns = on_gpu if top.is_offload_states is None else top.is_offload_states
    if not (takes_turns and roles.infer):
        return
    mine = set(roles.infer.devices or ())
    for role in roles.placed():
        shared = mine & set(role.devices or ())
        if role is not roles.infer and shared:
            top.diag.error(
                KEY,
                f"{top.async_generation_ratio} lets generation and training run at the same time, but"
                f" {roles.infer.path} and {role.path} share {short_devices(sorted(shared))} and must take turns; give"
                f" the engines separate devices, or set {KEY} to 0",
            )
            return


def _check_correction(top: Top, mode: str) -> None:
    """Check the correction of stale samples.

    A run with rewards needs a correction. In a run without rewards, importance weights are refused.
    """
    correction = read_correction(top)
    if mode == "pure":
        if correction and correction.weight:
            top.train_infer_correction.diag.error(
                "is_weight",
                f"multiplies only the reward's part of the advantage with {KEY}, but pure distillation has no reward."
                " The teachers' part always has separate importance weights; use filters, or remove is_weight",
            )
    elif correction is None or not (correction.weight or correction.filters):
        stale = f"{top.async_generation_ratio} trains the reward's part on samples of older weights"
        top.diag.unsupported(KEY, f"{stale}, whose importance ratio would be taken as 1; write {ADVICE}")
