"""Compare the pipeline that a configuration is written for with the requested one."""

from collections.abc import Mapping
from typing import Any

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.schema import MIXED_ROLES, PURE_ROLES, SUPERVISED
from roll_opd.planner import environments

# pipeline -> its description; its launcher in examples/
LAUNCHERS = {
    "distill": ("pure on-policy distillation", "start_onpolicy_distill_pipeline.py"),
    "rlvr": ("learning from rewards (RLVR)", "start_rlvr_pipeline.py"),
    "agentic": ("learning in environments", "start_agentic_pipeline.py"),
    "sft": ("supervised fine-tuning", "start_sft_pipeline.py"),
    "dpo": ("direct preference optimization", "start_dpo_pipeline.py"),
}


def pipeline_of(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (pipeline, decisive key) of a configuration; None if its keys do not decide."""
    for name, keys in SUPERVISED.items():
        if keys.role in values and keys.role not in (*PURE_ROLES, *MIXED_ROLES):
            return name, keys.role
    engine = next((role for role in (PURE_ROLES[1], MIXED_ROLES[1]) if role in values), None)
    if engine is None:
        for name, keys in SUPERVISED.items():
            if values.get("algorithm_type") == keys.algorithm:
                return name, "algorithm_type"
            if own := sorted(keys.own_keys & values.keys()):
                return name, own[0]
    if environments.is_agentic(values):
        return "agentic", next((key for key in environments.SECTIONS if values.get(key)), "pure_opd_pipeline_type")
    if values.get("is_pure_opd") is True:
        return "distill", "is_pure_opd"
    if values.get("use_opd") is True:
        return "rlvr", "use_opd"
    pure = next((role for role in PURE_ROLES if role in values), None)
    if pure and values.get("is_pure_opd") is None:
        return "distill", pure
    return ("rlvr", engine) if engine and not values.get("teacher") else None


def wrong_pipeline(values: Mapping[str, Any], asked: str, diag: Diagnostics) -> str | None:
    """Return an error if a configuration is written for another pipeline than `asked`, else None."""
    found = pipeline_of(values)
    if found is None and asked == "agentic" and MIXED_ROLES[1] in values:
        found = "rlvr", MIXED_ROLES[1]
    if asked not in LAUNCHERS or found is None or found[0] not in LAUNCHERS or found[0] == asked:
        return None
    if asked not in SUPERVISED and values.get("algorithm_type") in [keys.algorithm for keys in SUPERVISED.values()]:
        return None  # reported elsewhere, with the launcher
    meant, key = found
    is_played_pure = meant == "agentic" and not values.get("use_opd") and values.get("teacher")
    if asked == "distill" and is_played_pure and values.get("is_pure_opd") is not False:
        return None  # ROLL's distillation launcher also runs environments
    if asked == "rlvr" and key == "is_pure_opd":
        return None  # ROLL runs pure distillation in its RLVR pipeline
    what, launcher = LAUNCHERS[meant]
    return (
        f"{key}: belongs to {what}, which {LAUNCHERS[asked][1]} (pipeline {asked}) does not run;"
        f" start it with examples/{launcher}, or with `roll-opd run {meant}`{diag.where(key)}"
    )
