"""Turn the configuration of a user into a `RunPlan`: compose it, validate it, check everything, and freeze the result.

`load_plan` is the only entry point. It starts no process and writes no file. It reports all problems of a configuration
together. The checks and fields of runs with rollouts are in `rollout_parts`. The checks and fields of supervised runs
are in `supervised_parts`.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

from roll_opd.base import hardware, hub
from roll_opd.base.failures import ConfigError
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.paths import also_resolving_in
from roll_opd.base.user_modules import search_modules_in
from roll_opd.config.compose import LoadedConfig, find_config, load_config
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import CheckpointPlan, RunPlan
from roll_opd.config.schema import PIPELINES, CheckpointKeys, Run, RunKeys, Supervised, Top, shared
from roll_opd.config.translators import translator_of
from roll_opd.config.yaml_files import yaml_text
from roll_opd.models.flops import sequence_flops
from roll_opd.models.megatron_support import not_yet
from roll_opd.models.memory import estimate_memory
from roll_opd.models.model_files import engine_problem
from roll_opd.planner import (
    check_files,
    device_mapping,
    lengths_and_batches,
    role_parts,
    rollout_parts,
    row_plans,
    supervised_parts,
)
from roll_opd.planner.check_router_replay import check_replay
from roll_opd.planner.pipeline_choice import pipeline_keys
from roll_opd.planner.role_reader import RoleReader, choose_mode
from roll_opd.planner.tracker_sections import read_trackers
from roll_opd.planner.validate_sections import Sections, read_sections
from roll_opd.tracking.secrets import without_secrets
from roll_opd.tracking.tracker_registry import lacking


def load_plan(
    config_path: str,
    config_name: str,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    pure: bool | None = None,
    pipeline: str | None = None,
    runnable: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> RunPlan:
    """Return the plan of a run, or raise ConfigError with all problems found.

    Relative paths inside a configuration are looked up in three places, in this order: the current directory (as in
    ROLL), the directory of the configuration file, and the repository (the parent of `examples/`). If Python does not
    find a module of the user, the module is looked up in the current directory and in the directory of the
    configuration file.

    Args:
        config_path: a directory, searched for in `compose.config_places`.
        config_name: a YAML file in that directory.
        pure: True selects pure distillation, as in ROLL's start_onpolicy_distill_pipeline.py. False selects the RLVR
            entry, in which `use_opd` decides whether to distil. If `pure` and `pipeline` are None, the keys of the
            configuration decide which pipeline runs.
        pipeline: agentic, a name of `PIPELINES`, or the path of a module that adds a pipeline to `PIPELINES`. If the
            configuration is for another pipeline, only this problem is reported, and the message names the right
            launcher.
        runnable: if False, configurations that cannot be run yet are planned too. The `warnings` of the plan then give
            the reasons, and its `refusals` the reasons that hold on every machine.
        say: callback that gets the translation report of a configuration of another system. For such a configuration,
            `pure` and `pipeline` have no effect.
    """
    with hub.recording() as found:
        loaded = _loaded(config_path, config_name, list(overrides))
        if loaded.translation:
            say(loaded.translation)
            pure = pipeline = None
        search_modules_in(Path(), loaded.directory)
        with also_resolving_in(loaded.directory):
            plan = plan_config(loaded, pure=pure, pipeline=pipeline, runnable=runnable)
    return replace(plan, hub=FrozenDict(found))


def plan_of_run(run: Path, facts: Mapping[str, Any]) -> RunPlan:
    """Return the plan of the configuration in a run directory.

    Relative paths begin where the run was started, if this directory still exists. `facts` is the content of the run's
    `run.json`.
    """
    pipeline, started_in = facts.get("pipeline"), str(facts.get("directory", ""))
    named = pipeline if pipeline in PIPELINES.keys() - {Top.pipeline} else None
    pure = None if named else facts.get("mode") == "pure"
    place = str(run.absolute())
    with chdir(started_in if os.path.isdir(started_in) else "."):
        return load_plan(place, "config", pure=pure, pipeline=named, runnable=False)


def _loaded(config_path: str, config_name: str, overrides: list[str]) -> LoadedConfig:
    """Return the composed configuration. A configuration of another system is translated. Raises ConfigError."""
    directory, name = find_config(config_path, config_name)
    file = directory / f"{name}.yaml"
    translator = translator_of(file)
    return translator.load(file, overrides) if translator else load_config(config_path, config_name, overrides)


def plan_config(
    loaded: LoadedConfig, *, pure: bool | None = None, pipeline: str | None = None, runnable: bool = True
) -> RunPlan:
    """Return the plan of a configuration that is already composed. See `load_plan`."""
    variables = loaded.values.get("system_envs")
    with hub.environment(variables if isinstance(variables, dict) else {}):
        return _checked_plan(loaded, pure, pipeline, runnable)


def _checked_plan(loaded: LoadedConfig, pure: bool | None, pipeline: str | None, runnable: bool) -> RunPlan:
    diagnostics = Diagnostics(loaded.origins, texts=loaded.texts)
    plan = _planned(loaded, pipeline_keys(loaded.values, pure, pipeline, diagnostics), pure, diagnostics)
    if plan is None or diagnostics.problems:
        blockers = [*diagnostics.blockers, *diagnostics.blockers_here]
        found = [*diagnostics.problems, *(blockers if runnable else ())]
        raise ConfigError(found or ["the configuration could not be read"])
    refusals = [*diagnostics.blockers]
    refusals += [sentence for role in plan.megatron_roles().values() for sentence in not_yet(role)]
    engines = {role.model.path for role in plan.inference_roles().values()}
    refusals += [sentence for path in sorted(engines) if (sentence := engine_problem(Path(path)))]
    sentences = [*refusals, *diagnostics.blockers_here, *lacking(plan.trackers)]
    if sentences and runnable:
        raise ConfigError(sentences)
    rows = row_plans.first_rows(plan)
    absent = row_plans.absent_columns(plan)
    problems = [*check_files.missing_templates(plan, rows), *(text for found in absent.values() for text in found)]
    if not runnable:  # a run reads all rows and reports all that it refuses
        problems += row_plans.unusable_rows(plan, {key: some for key, some in rows.items() if key not in absent})
    if problems:
        raise ConfigError(problems)
    plain = row_plans.plain_prompts(plan, rows)
    shown = (*check_files.turn_end_warnings(plan, rows), *filter(None, [plain]))
    warnings = (*diagnostics.warnings, *sentences, *shown)
    downloads = tuple(diagnostics.downloads)
    return replace(plan, warnings=warnings, refusals=tuple(refusals), plain_prompts=plain, downloads=downloads)


def _planned(loaded: LoadedConfig, keys: type[Run], pure: bool | None, diag: Diagnostics) -> RunPlan | None:
    """Return the plan of a run, or None if problems prevent a plan.

    `keys` are the keys of the pipeline of the run.
    """
    supervised = issubclass(keys, Supervised)
    mode = keys.pipeline if supervised else choose_mode(loaded.values, pure, diag)
    sections = read_sections(loaded.values, loaded.variables, keys, mode, diag)
    if not supervised:
        rollout_parts.complete(sections, keys)
    RoleReader(sections, diag).read(keys)
    check_replay(sections, supervised)
    check_files.compare_models(sections)
    fields = (supervised_parts if supervised else rollout_parts).fields(sections)
    if sections.top is None:
        return None
    common = _common(loaded, sections.top, sections)
    if fields is None or diag.problems:
        return None
    plan = RunPlan(**common | fields | ({} if fields["validation"] else {"eval_steps": 0}))
    _check_engines(plan, sections)
    device_mapping.check_m2n(plan, sections.top.diag, on_cpu=hardware.engines_are_on_cpus())
    return _finished(plan, loaded, sections.top, sections)


def _common(loaded: LoadedConfig, top: Run, sections: Sections) -> dict[str, Any]:
    """Check the keys that every pipeline has. Return the fields of the plan for these keys."""
    exp_name = top.exp_name or loaded.name
    output_dir = check_files.check_output(top, exp_name, sections.train.info if sections.train else None)
    trackers = read_trackers(top)
    resume = check_files.read_resume(top)
    return {
        **shared(RunKeys, top),
        "output_dir": output_dir,
        "logging_dir": check_files.check_logging(top, exp_name),
        "exp_name": exp_name,
        "num_nodes": device_mapping.nodes(sections.placed(), top),
        "devices_per_node": top.num_gpus_per_node,
        "checkpoint": CheckpointPlan(**shared(CheckpointKeys, top), resume=resume),
        "trackers": tuple(trackers),
        "tracker_args": FrozenDict(trackers),
        "env": role_parts.environment(top),
        "chat_template_kwargs": row_plans.chat_variables(top, sections),
    }


def _check_engines(plan: RunPlan, sections: Sections) -> None:
    """Check that the options of each engine fit together, as vLLM does when it starts."""
    diags = {role.path: role.diag for role in sections.placed()}
    for engine in plan.inference_roles().values():
        lengths_and_batches.check_batched_tokens(engine, diags[engine.name], hardware.engines_are_on_cpus())


def _finished(plan: RunPlan, loaded: LoadedConfig, top: Run, sections: Sections) -> RunPlan:
    """Return `plan` with its estimates and its YAML text."""
    models = {role.path: role.info for role in sections.placed() if role.info}
    longest = top.longest
    on_devices = replace(plan, device_memory_gb=top.device_memory_gb or hardware.gpu_memory_gb())
    memory = estimate_memory(on_devices, models, longest)
    finished = replace(
        on_devices,
        memory=FrozenDict(memory),
        flops=FrozenDict({name: sequence_flops(models[name], longest, longest) / longest for name in memory}),
        config_yaml=yaml_text(without_secrets(loaded.values)),
    )
    top.diag.warn_unused()  # all keys have been read
    device_mapping.check_memory(finished, top.diag)
    return finished
