"""Find the pipeline of a configuration. Refuse a wrong launcher.

Without this refusal, later checks would report dozens of unknown keys.
"""

from collections.abc import Mapping
from typing import Any

from roll_opd.base.entry_points import entries, load, load_all
from roll_opd.base.failures import ConfigError
from roll_opd.base.user_modules import users_module
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.schema import (
    MIXED_ROLES,
    PIPELINES,
    PURE_ROLES,
    OfflineDistill,
    Run,
    Supervised,
    Top,
    supervised_pipelines,
)
from roll_opd.objective.algorithms import algorithm
from roll_opd.objective.registry import AlgorithmError

# pipeline -> (description, launcher in examples/)
LAUNCHERS = {
    "distill": ("pure on-policy distillation", "start_onpolicy_distill_pipeline.py"),
    "rlvr": ("learning from rewards (RLVR)", "start_rlvr_pipeline.py"),
    "sft": ("supervised fine-tuning", "start_sft_pipeline.py"),
    "dpo": ("direct preference optimization", "start_dpo_pipeline.py"),
    "offline_distill": ("distillation from teacher files", "start_offline_distill_pipeline.py"),
}


def pipeline_keys(values: Mapping[str, Any], pure: bool | None, pipeline: str | None, diag: Diagnostics) -> type[Run]:
    """Return the class with the keys of a pipeline: the requested pipeline, or the one that the configuration is for.

    `pure` and `pipeline` are arguments of `load_plan`. Raises ConfigError with a single problem if the configuration is
    for another pipeline than the requested one, or for a pipeline that does not exist here.
    """
    load_all("pipelines")
    requested = pipeline or (None if pure is None else "distill" if pure else "rlvr")
    # entries return why the pipeline of a configuration does not exist here
    refusals = (load(entry)(values) for entry in entries("refusals").values())
    problem = next(filter(None, refusals), None)
    if problem is None and requested:
        # checked first: errors about the keys of another pipeline would be misleading
        problem = _wrong_pipeline(values, requested, diag)
    if problem is None:
        keys = _keys(values, pure, pipeline)
        if issubclass(keys, Supervised):
            return keys
        problem = _rows_problem(values, diag)
    if problem:
        raise ConfigError([problem])
    return keys


def _pipeline_of(values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (pipeline, key): the pipeline of a configuration, and the key that identifies it.

    The result is None if no key identifies a pipeline.
    """
    for name, rolled_out in PIPELINES.items():
        if issubclass(rolled_out, Top) and (own := rolled_out.selected_by(values)):
            return name, own
    supervised = supervised_pipelines()
    for name, keys in supervised.items():
        if keys.role in values and keys.role not in (*PURE_ROLES, *MIXED_ROLES):
            return name, keys.role
    engine = next((role for role in (PURE_ROLES[1], MIXED_ROLES[1]) if role in values), None)
    if engine is None:
        if has_files(values.get("teacher")):
            return OfflineDistill.pipeline, "teacher.files"
        for name, keys in supervised.items():
            if values.get("algorithm_type") == keys.algorithm:
                return name, "algorithm_type"
            if own := keys.selected_by(values):
                return name, own
    if values.get("is_pure_opd") is True:
        return "distill", "is_pure_opd"
    if values.get("use_opd") is True:
        return "rlvr", "use_opd"
    pure = next((role for role in PURE_ROLES if role in values), None)
    if pure and values.get("is_pure_opd") is None:
        return "distill", pure
    return ("rlvr", engine) if engine and not values.get("teacher") else None


def has_files(teacher: Any) -> bool:
    """Whether a `teacher` section names teacher files."""
    return isinstance(teacher, Mapping) and "files" in teacher


def _wrong_pipeline(values: Mapping[str, Any], requested: str, diag: Diagnostics) -> str | None:
    """Return an error if a configuration is for another pipeline than the requested one, else None."""
    found = _pipeline_of(values)
    if found is None and getattr(PIPELINES.get(requested), "makes_tasks", False) and MIXED_ROLES[1] in values:
        found = "rlvr", MIXED_ROLES[1]
    launchers = LAUNCHERS | {name: keys.launcher for name, keys in PIPELINES.items() if keys.launcher}
    if requested not in launchers or found is None or found[0] not in launchers or found[0] == requested:
        return None
    supervised = supervised_pipelines()
    if requested not in supervised and values.get("algorithm_type") in [keys.algorithm for keys in supervised.values()]:
        return None  # `_rows_problem` reports it and names the launcher
    meant, key = found
    makes_tasks = getattr(PIPELINES.get(meant), "makes_tasks", False)
    is_pure = not values.get("use_opd") and values.get("teacher") and values.get("is_pure_opd") is not False
    if requested == "distill" and makes_tasks and is_pure:
        return None  # ROLL's launcher of distillation also runs environments
    if requested == "rlvr" and key == "is_pure_opd":
        return None  # ROLL runs pure distillation in its RLVR pipeline
    what, launcher = launchers[meant]
    return (
        f"{key}: belongs to {what}, but {launchers[requested][1]} runs pipeline {requested}; start it with"
        f" examples/{launcher}, or with `roll-opd run {meant}`{diag.where(key)}"
    )


def _keys(values: Mapping[str, Any], pure: bool | None, pipeline: str | None) -> type[Run]:
    """Return the class with the keys of the requested pipeline, or of the pipeline that the configuration is for.

    Raises ConfigError for an unknown name.
    """
    if pipeline is None:
        found = _pipeline_of(values)
        keys = PIPELINES.get(found[0], Top) if found else Top
        return keys if pure is None or issubclass(keys, Top) else Top
    if pipeline not in PIPELINES:
        ordered = sorted(PIPELINES, key=lambda name: issubclass(PIPELINES[name], Supervised))
        names = ", ".join(["distill", *ordered])
        problem = f"no pipeline {pipeline!r}; known: {names}, or a module's dotted path"
        try:
            users_module(pipeline)  # declares the pipeline's keys
        except ImportError as error:
            raise ConfigError([f"{problem}: {error}"]) from None
        if pipeline not in PIPELINES:
            declares = f"a subclass of Top or Supervised with pipeline = {pipeline!r}"
            raise ConfigError([f"{problem}: the module {pipeline} declares no keys; write {declares} in it"])
    return PIPELINES[pipeline]


def _rows_problem(values: Mapping[str, Any], diag: Diagnostics) -> str | None:
    """Return an error if `algorithm_type` belongs to a supervised pipeline, else None."""
    name = values.get("algorithm_type")
    try:
        schema = algorithm(name).schema if isinstance(name, str) else "experience"
    except AlgorithmError:
        return None  # reported with all other problems
    if schema == "experience":
        return None
    return (
        f"algorithm_type: {name} trains on rows of schema {schema}, not on rollouts; run it with"
        f" start_{schema}_pipeline.py{diag.where('algorithm_type')}"
    )
