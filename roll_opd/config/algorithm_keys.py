"""From `algorithm_type` and Trinity-RFT's keys to the keys that the rest of the configuration reads.

A row of the table is what a user did not write: `expand` fills it in, so that nothing behind it knows of rows.
"""

from collections.abc import Mapping
from typing import Any

from roll_opd.config.algorithms import (
    ADVANTAGE_FUNCTIONS,
    ADVANTAGES,
    EXPERT_DATA_RATIO,
    FUNCTION_ALIASES,
    KL_LOSS_COEF,
    LOSSES,
    POLICY_LOSS_FUNCTIONS,
    AdvantageFacts,
    Algorithm,
    AlgorithmError,
    LossFacts,
    algorithm,
    located,
    merged_arguments,
)
from roll_opd.config.errors import Findings
from roll_opd.config.schema import Top

# ROLL's pg_variant -> the arguments of its own defaults; the others have those of their loss
PG_VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "ppo": {},
    "tis": {},
    "topr": {},
    "cispo": {"clip_low": 0.1, "clip_high": 0.1},
    "kimi15": {},
}
OF_THE_LOSS = ("loss_agg_mode",)  # given among a loss's arguments in Trinity-RFT, a key of its own here


def pipeline_problem(values: Mapping[str, Any], findings: Findings) -> str | None:
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
        f" start_{schema}_pipeline.py{findings.where('algorithm_type')}"
    )


def expand(top: Top, repeats: bool, findings: Findings) -> Top:
    """Return `top` with what its algorithm, and its functions' arguments, say where nobody wrote the key.

    `repeats`: a role says already how many responses a prompt gets.
    """
    row = _row(top, findings)
    written: dict[str, Any] = {}
    _take_loss(top, row, written, findings)
    _take_advantage(top, row, written, findings)
    written["expert_data_ratio"] = _expert_data_ratio(row, written.get("policy_loss"))
    if row is not None:
        written["num_return_sequences_in_group"] = None if repeats else row.repeat
        if row.kl_loss is not None and top.use_kl_loss is not False:
            written |= {"use_kl_loss": True, "kl_loss_fn": row.kl_loss, "kl_loss_coef": KL_LOSS_COEF}
    if top.kl_loss_fn == "none":
        written |= {"use_kl_loss": False}
    missing = {
        key: value
        for key, value in written.items()
        if value is not None and (key not in top.model_fields_set or getattr(top, key) is None or key in OVERRIDDEN)
    }
    return top.model_copy(update=missing) if missing else top


OVERRIDDEN = ("policy_loss", "adv_estimator", "policy_loss_fn_args", "advantage_fn_args")  # resolved by now


def _row(top: Top, findings: Findings) -> Algorithm | None:
    if top.algorithm_type is None:
        return None
    try:
        row = algorithm(top.algorithm_type)
    except AlgorithmError as error:
        findings.problem("algorithm_type", str(error))
        return None
    return row


def _expert_data_ratio(row: Algorithm | None, policy_loss: str | None) -> float | None:
    """The row's, or what a loss that reads demonstrations needs without a row."""
    if row is not None and row.expert_data_ratio:
        return row.expert_data_ratio
    return EXPERT_DATA_RATIO if LOSSES.get(policy_loss, LossFacts()).needs == "demonstrations" else None


def _take_loss(top: Top, row: Algorithm | None, written: dict[str, Any], findings: Findings) -> None:
    variant = top.pg_variant or ("topr" if top.use_topr_loss else None)
    if variant is not None and variant not in PG_VARIANTS:
        findings.problem("pg_variant", f"{variant!r} is unknown; use one of {', '.join(PG_VARIANTS)}")
        return
    chosen = {
        "policy_loss_fn": top.policy_loss_fn,
        "policy_loss": top.policy_loss,
        "pg_variant" if top.pg_variant else "use_topr_loss": variant,
    }
    named = {key: name for key, name in chosen.items() if name is not None}
    if len(set(named.values())) > 1:
        findings.problem(next(iter(named)), f"contradicts {', '.join(list(named)[1:])}; write one of them")
        return
    key, name = next(iter(named.items()), ("algorithm_type", row.policy_loss if row else None))
    given = dict(top.policy_loss_fn_args)
    if top.importance_sampling == "seq":
        name = name or "ppo"
        given = {"ratio_type": "sequence", **given}
        if name != "ppo":
            findings.problem("importance_sampling", f"seq is a ratio of policy loss ppo, and the loss is {name}")
    if name is None:
        if given:
            findings.problem("policy_loss_fn_args", "are of which loss? write policy_loss_fn or algorithm_type too")
        return
    if row is not None and name == row.policy_loss:
        given = {**row.policy_loss_args, **given}
    if variant is not None:
        given = {**PG_VARIANTS[variant], **given}
    written |= {own: given.pop(own) for own in OF_THE_LOSS if own in given}
    try:
        written["policy_loss"] = located(POLICY_LOSS_FUNCTIONS, name)
    except AlgorithmError as error:
        findings.problem(key, str(error))
        return
    facts = LOSSES.get(name)
    if facts is not None:
        written.setdefault("loss_agg_mode", facts.loss_agg_mode)
        given = _known("policy_loss_fn_args", f"policy loss {name}", given, facts.defaults, findings)
        trinity = key == "policy_loss_fn" or (key == "algorithm_type" and row is not None)
        if facts.clips and trinity and "dual_clip_loss" not in top.model_fields_set:
            given = {
                "dual_clip": facts.defaults["dual_clip"],
                **given,
            }  # ROLL's keys have ROLL's default, which is none
    written["policy_loss_fn_args"] = given


def _take_advantage(top: Top, row: Algorithm | None, written: dict[str, Any], findings: Findings) -> None:
    name = top.advantage_fn or top.adv_estimator or (row.advantage if row else None)
    given = dict(top.advantage_fn_args)
    if top.advantage_fn is not None and top.adv_estimator not in (None, top.advantage_fn):
        findings.problem("advantage_fn", "contradicts adv_estimator; write one of them")
        return
    if name is None:
        if given:
            findings.problem("advantage_fn_args", "are of which function? write advantage_fn or algorithm_type too")
        if row is not None:  # the loss reads none
            written["adv_estimator"] = "reinforce"
        return
    if top.adv_estimator is None:
        name = FUNCTION_ALIASES.get(name, name)
    try:
        path = located(ADVANTAGE_FUNCTIONS, name)
    except AlgorithmError as error:
        findings.problem("advantage_fn", str(error))
        return
    written["adv_estimator"] = path
    if row is not None and name == row.advantage:
        given = {**row.advantage_args, **given}
    facts = ADVANTAGES.get(name, AdvantageFacts())
    of_tokens = ("lam", *facts.tokens)
    if top.adv_estimator is None:  # ROLL's key has ROLL's defaults
        written |= merged_arguments({own: given[own] for own in of_tokens if own in given}, facts.tokens)[0]
    given = {own: value for own, value in given.items() if own not in of_tokens}
    if name in ADVANTAGES:
        given = _known("advantage_fn_args", f"advantage {name}", given, facts.defaults, findings)
    written["advantage_fn_args"] = given


def _known(key: str, of: str, given: dict[str, Any], defaults: Any, findings: Findings) -> dict[str, Any]:
    """Return the arguments under our names; says which ones the function does not take."""
    for name in merged_arguments(given, defaults)[1]:
        takes = f"takes {', '.join(defaults)}" if defaults else "takes none"
        findings.problem(f"{key}.{name}", f"is no argument of {of}, which {takes}")
    return dict(merged_arguments(given, {})[0])
