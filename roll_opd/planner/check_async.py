"""Checks of generation that runs ahead of training: devices, depth, and the correction of stale samples."""

import os

from roll_opd.base import hardware
from roll_opd.config.schema import Top
from roll_opd.planner.device_mapping import short_devices
from roll_opd.planner.objective_plan import read_correction
from roll_opd.planner.role_reader import Roles

KEY = "async_generation_ratio"
ADVICE = "train_infer_correction: {is_weight: {enabled: true}} (truncated importance weights), or filters"


def check_async(top: Top, roles: Roles) -> None:
    """Refuse stale samples without a correction, and engines that share devices with Megatron roles."""
    if not top.async_generation_ratio:
        top.diag.unused(*({"async_depth", "on_weight_update"} & top.written))
        return
    if top.async_depth is not None and top.async_depth > top.async_generation_ratio:
        top.diag.error(
            "async_depth",
            f"{top.async_depth:g} batches ahead are more than {KEY} {top.async_generation_ratio:g}, the bound of the"
            " samples' age; lower it, or raise the bound",
        )
    elif top.async_generation_ratio * top.rollout_batch_size < 1:
        top.diag.note(KEY, f"{top.async_generation_ratio:g} of {top.rollout_batch_size} prompts is less than one, so 0")
    if top.is_use_additional_prompts:
        top.diag.note(
            "is_use_additional_prompts", f"has no effect with {KEY}, as prompts ahead replace rejected prompts"
        )
    if top.deterministic and "on_weight_update" in top.written and top.on_weight_update != "wait":
        top.diag.error(
            "on_weight_update",
            f"{top.on_weight_update} makes the weights that sample a token depend on timing, but deterministic is true;"
            " write wait, or leave it out",
        )
    _check_devices(top, roles)
    _check_correction(top, roles.mode)


def _check_devices(top: Top, roles: Roles) -> None:
    """Refuse engines that take turns with another role on the same devices."""
    on_gpu = hardware.has_gpu_driver() or bool(os.environ.get("RAY_ADDRESS"))
    takes_turns = on_gpu if top.is_offload_states is None else top.is_offload_states
    if not (takes_turns and roles.infer):
        return
    mine = set(roles.infer.strategy.devices or ())
    for role in roles.placed():
        shared = mine & set(role.strategy.devices or ())
        if role is not roles.infer and shared:
            top.diag.error(
                KEY,
                f"{top.async_generation_ratio:g} lets generation and training run at the same time, but"
                f" {roles.infer.path} and {role.path} share {short_devices(sorted(shared))} and must take turns; give"
                " the engines separate devices, or set 0",
            )
            return


def _check_correction(top: Top, mode: str) -> None:
    """Refuse stale samples with a reward if no correction is set, and importance weights in a run without a reward."""
    correction = read_correction(top)
    if mode == "pure":
        if correction and correction.weight:
            top.train_infer_correction.diag.error(
                "is_weight",
                f"weighs only the reward's part with {KEY}; pure distillation has no reward, and computes its reverse"
                " KL from current log-probs; use filters, or leave it out",
            )
    elif correction is None or not (correction.weight or correction.filters):
        top.diag.error(
            KEY,
            f"{top.async_generation_ratio:g} trains the reward's part on samples of older weights, whose importance"
            f" ratio would be 1 without a correction; write {ADVICE}",
        )
