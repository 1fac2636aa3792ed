"""From a user's configuration to a `RunPlan`: compose, validate, check everything, then freeze.

`load_plan` is the one entry. It starts nothing, writes nothing and needs none of torch, vLLM or Megatron.
"""

from dataclasses import replace

from roll_opd.config.algorithms import Answered
from roll_opd.config.assemble import assemble
from roll_opd.config.availability import unavailable
from roll_opd.config.errors import ConfigError, Findings
from roll_opd.config.examine import check
from roll_opd.config.load import LoadedConfig, load_config
from roll_opd.config.plan import RunPlan
from roll_opd.config.supervised import plan_supervised, schema_of


def load_plan(
    config_path: str,
    config_name: str,
    overrides: list[str] | tuple[str, ...] = (),
    *,
    pure: bool | None = None,
    schema: Answered | None = None,
    runnable: bool = True,
) -> RunPlan:
    """Return the plan of a run, or raise ConfigError with every problem that could be found.

    `config_path` is a directory (from the current directory or from `examples/`), `config_name` a YAML
    file in it. `pure` True: pure distillation (what start_onpolicy_distill_pipeline.py runs); False: the
    RLVR entry, where `use_opd` decides. `schema`: what start_sft_pipeline.py and start_dpo_pipeline.py run. Where both
    are None, the configuration tells. `runnable` False also plans what cannot be run yet, and says so in `warnings`.

    Relative paths inside a configuration are relative to the current directory, as in ROLL; what is not
    found there is looked for in the repository (the parent of `examples/`).
    """
    return plan_config(
        load_config(config_path, config_name, list(overrides)), pure=pure, schema=schema, runnable=runnable
    )


def plan_config(
    loaded: LoadedConfig,
    *,
    pure: bool | None = None,
    schema: Answered | None = None,
    runnable: bool = True,
) -> RunPlan:
    """Return the plan of an already composed configuration, or raise ConfigError; see `load_plan`."""
    findings = Findings(loaded.origins)
    if pure is None and schema is None:
        schema = schema_of(loaded.values)
    plan = _planned(loaded, pure, runnable, findings) if schema is None else plan_supervised(loaded, schema, findings)
    sentences = [*findings.blockers, *unavailable(plan)]
    if sentences and runnable:
        raise ConfigError(sentences)
    return replace(plan, warnings=(*plan.warnings, *sentences))


def _planned(loaded: LoadedConfig, pure: bool | None, runnable: bool, findings: Findings) -> RunPlan:
    checked = check(loaded, pure, findings)
    if findings.problems:
        raise ConfigError([*findings.problems, *(findings.blockers if runnable else ())])
    if checked is None:
        raise ConfigError(["the configuration could not be read"])
    return assemble(checked, findings)
