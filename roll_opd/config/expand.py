"""Fills in what the row of an `algorithm_type` says, so that nothing behind it knows of rows; Trinity-RFT's keys."""

from collections.abc import Mapping
from typing import Any

from roll_opd.algorithms.registry import ADVANTAGES, POLICY_LOSSES, AlgorithmError
from roll_opd.algorithms.table import (
    EXPERT_DATA_RATIO,
    FUNCTION_ALIASES,
    KL_LOSS_COEF,
    Algorithm,
    advantage_facts,
    algorithm,
    loss_facts,
    merged_arguments,
)
from roll_opd.config.errors import Diagnostics
from roll_opd.config.schema import Top, changed
from roll_opd.config.variants import Variant
from roll_opd.extensions import Registry, argument_problems

OF_THE_LOSS = ("loss_agg_mode",)  # given among a loss's arguments in Trinity-RFT, a key of its own here
RESOLVED = ("policy_loss", "adv_estimator", "policy_loss_fn_args", "advantage_fn_args")  # whatever is written


def pipeline_problem(values: Mapping[str, Any], diagnostics: Diagnostics) -> str | None:
    """Say that `algorithm_type` learns from rows with answers, which has a pipeline of its own; None: it rolls out."""
    name = values.get("algorithm_type")
    try:
        schema = algorithm(name).schema if isinstance(name, str) else "experience"
    except AlgorithmError:
        return None  # told with everything else
    if schema == "experience":
        return None
    return (
        f"algorithm_type: {name} learns from rows of schema {schema}, not from rollouts; run it with"
        f" start_{schema}_pipeline.py{diagnostics.where('algorithm_type')}"
    )


def expand(top: Top, repeats: bool, variant: Variant | None, diagnostics: Diagnostics) -> Top:
    """Return `top` with what its algorithm, and its functions' arguments, say where the key is not written.

    `repeats`: a role says already how many responses a prompt gets. `variant`: the policy loss that a pg_variant names.
    """
    row = None
    if top.algorithm_type is not None:
        try:
            row = algorithm(top.algorithm_type)
        except AlgorithmError as error:
            diagnostics.problem("algorithm_type", str(error))
    found: dict[str, Any] = {}
    _take_loss(top, row, variant, found, diagnostics)
    _take_advantage(top, row, found, diagnostics)
    if row is not None and row.expert_data_ratio:
        found["expert_data_ratio"] = row.expert_data_ratio
    elif loss_facts(found.get("policy_loss")).needs == "demonstrations":
        found["expert_data_ratio"] = EXPERT_DATA_RATIO
    if row is not None:
        found["loss_agg_mode"] = found.get("loss_agg_mode") or row.loss_agg_mode
        found["num_return_sequences_in_group"] = None if repeats else row.repeat
        if row.kl_loss is not None and top.use_kl_loss is not False:
            found |= {"use_kl_loss": True, "kl_loss_fn": row.kl_loss, "kl_loss_coef": KL_LOSS_COEF}
    if top.kl_loss_fn == "none":
        found["use_kl_loss"] = False
    missing = {
        key: value
        for key, value in found.items()
        if value is not None and (key not in top.written or getattr(top, key) is None or key in RESOLVED)
    }
    return changed(top, missing)


def _take_loss(
    top: Top, row: Algorithm | None, variant: Variant | None, found: dict[str, Any], diagnostics: Diagnostics
) -> None:
    if top.policy_loss is not None and not diagnostics.is_one_of("policy_loss", top.policy_loss, POLICY_LOSSES.builtin):
        return
    chosen = {"policy_loss_fn": top.policy_loss_fn, "policy_loss": top.policy_loss}
    if variant is not None:
        chosen[variant.key] = variant.name
    named = {key: name for key, name in chosen.items() if name is not None}
    if len(set(named.values())) > 1:
        diagnostics.problem(next(iter(named)), f"contradicts {', '.join(list(named)[1:])}; write one of them")
        return
    key, name = next(iter(named.items()), ("algorithm_type", row.policy_loss if row else None))
    given = dict(top.policy_loss_fn_args)
    if top.importance_sampling == "seq" and variant is not None and variant.is_of_role:
        diagnostics.say(
            "importance_sampling", "seq has no effect, as in ROLL, whose ActorPGWorker takes ratios of tokens"
        )
    elif top.importance_sampling == "seq":
        name = name or "ppo"
        given = {"ratio_type": "sequence", **given}
        if name != "ppo":
            diagnostics.problem("importance_sampling", f"seq is a ratio of policy loss ppo, and the loss is {name}")
    if name is None:
        if given:
            diagnostics.problem("policy_loss_fn_args", "are of which loss? write policy_loss_fn or algorithm_type too")
        return
    if row is not None and name == row.policy_loss:
        given = {**row.policy_loss_args, **given}
    if variant is not None:
        given = {**variant.arguments, **given}
    found |= {own: given.pop(own) for own in OF_THE_LOSS if own in given}
    try:
        found["policy_loss"] = POLICY_LOSSES.located(name)
    except AlgorithmError as error:
        diagnostics.problem(key, str(error))
        return
    if name in POLICY_LOSSES.builtin:
        facts, defaults = loss_facts(name), POLICY_LOSSES.defaults(name)
        found.setdefault("loss_agg_mode", facts.loss_agg_mode)
        given = _known("policy_loss_fn_args", POLICY_LOSSES, name, given, diagnostics)
        trinity = key == "policy_loss_fn" or (key == "algorithm_type" and row is not None)
        if facts.reads_pg_clip and trinity and "dual_clip_loss" not in top.written:
            given = {"dual_clip": defaults["dual_clip"], **given}  # ROLL's keys have ROLL's default, which is none
    found["policy_loss_fn_args"] = given


def _take_advantage(top: Top, row: Algorithm | None, found: dict[str, Any], diagnostics: Diagnostics) -> None:
    roll_names = (*ADVANTAGES.builtin, *ADVANTAGES.elsewhere)
    if top.adv_estimator is not None and not diagnostics.is_one_of("adv_estimator", top.adv_estimator, roll_names):
        return
    name = top.advantage_fn or top.adv_estimator or (row.advantage if row else None)
    given = dict(top.advantage_fn_args)
    if top.advantage_fn is not None and top.adv_estimator not in (None, top.advantage_fn):
        other = f"adv_estimator: {top.adv_estimator}{diagnostics.where('adv_estimator')}"
        diagnostics.problem("advantage_fn", f"contradicts {other}; write one of them, or adv_estimator=null beside it")
        return
    if name is None:
        if given:
            diagnostics.problem("advantage_fn_args", "are of which function? write advantage_fn or algorithm_type too")
        if row is not None:  # the loss reads none
            found["adv_estimator"] = "reinforce"
        return
    if top.adv_estimator is None:
        name = FUNCTION_ALIASES.get(name, name)
    try:
        path = ADVANTAGES.located(name)
    except AlgorithmError as error:
        diagnostics.problem("advantage_fn", str(error))
        return
    found["adv_estimator"] = path
    if row is not None and name == row.advantage:
        given = {**row.advantage_args, **given}
    token_defaults = advantage_facts(name).token_defaults
    of_tokens = ("lam", *token_defaults)
    if top.adv_estimator is None:  # ROLL's key has ROLL's defaults
        found |= merged_arguments({own: given[own] for own in of_tokens if own in given}, token_defaults)[0]
    given = {own: value for own, value in given.items() if own not in of_tokens}
    if name in ADVANTAGES.builtin:
        given = _known("advantage_fn_args", ADVANTAGES, name, given, diagnostics)
    found["advantage_fn_args"] = given


def _known(
    key: str, registry: Registry[Any], name: str, given: dict[str, Any], diagnostics: Diagnostics
) -> dict[str, Any]:
    """Return the arguments under our names; says which ones the function does not take, or not with that type."""
    defaults, ours = registry.defaults(name), dict(merged_arguments(given, {})[0])
    unknown = merged_arguments(given, defaults)[1]
    for argument in unknown:
        takes = f"takes {', '.join(defaults)}" if defaults else "takes none"
        diagnostics.problem(f"{key}.{argument}", f"is no argument of {registry.kind} {name}, which {takes}")
    if ours and not unknown:
        for argument, problem in argument_problems(registry.find(name), ours, given_by_us=1):
            diagnostics.problem(f"{key}.{argument}", problem)
    return ours
