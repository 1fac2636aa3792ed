"""Fill in unset keys with the values that follow from `algorithm_type`, from keys of Trinity-RFT, and from the mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll_opd.base.entry_points import entries, load
from roll_opd.base.registry import Registry, argument_problems
from roll_opd.config.roll_keys import PG_KEYS
from roll_opd.config.schema import Top, Worker, changed
from roll_opd.objective.algorithms import (
    EXPERT_DATA_RATIO,
    FUNCTION_ALIASES,
    KL_LOSS_COEF,
    Algorithm,
    advantage_facts,
    algorithm,
    loss_facts,
    merged_arguments,
)
from roll_opd.objective.registry import ADVANTAGES, POLICY_LOSSES, AlgorithmError

# keys that are filled in even if they are set
RESOLVED = ("policy_loss", "adv_estimator", "policy_loss_fn_args", "advantage_fn_args")


@dataclass(frozen=True)
class Variant:
    """A policy loss that `pg_variant` selects.

    `name` is the name of the loss in ROLL. `key` is the dotted path of the key `pg_variant`.
    """

    key: str
    name: str
    arguments: Mapping[str, Any]

    @property
    def is_of_role(self) -> bool:
        """Whether the key is set in a role.

        ROLL reads the key only in a role. If the key is set, ROLL computes ratios only per token.
        """
        return "." in self.key


def expand(top: Top, workers: Mapping[str, Worker | None], mode: str) -> Top:
    """Return `top` with values for unset keys.

    The values follow from the algorithm, from the arguments of the loss and advantage functions, and from the mode.
    After this, `policy_loss` is set and, except in pure distillation, `adv_estimator` too.
    """
    row = None
    if top.algorithm_type is not None:
        with top.diag.catching("algorithm_type", AlgorithmError):
            row = algorithm(top.algorithm_type)
    found = _loss(top, row, _variant(top, workers)) | _advantage(top, row, mode)
    found.setdefault("policy_loss", top.policy_loss or ("importance_sampling" if mode == "pure" else "ppo"))
    if row is not None and row.expert_data_ratio:
        found["expert_data_ratio"] = row.expert_data_ratio
    elif loss_facts(found["policy_loss"]).needs == "demonstrations":
        found["expert_data_ratio"] = EXPERT_DATA_RATIO
    if row is not None:
        found["loss_agg_mode"] = found.get("loss_agg_mode") or row.loss_agg_mode
        if not any(worker.generating_args.num_return_sequences for worker in workers.values() if worker):
            found["num_return_sequences_in_group"] = row.repeat
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


def _variant(top: Top, workers: Mapping[str, Worker | None]) -> Variant | None:
    """Return the policy loss that ROLL's `pg_variant` selects, or None if the configuration has no such key."""
    if top.pg_variant is None and not any(worker.written & PG_KEYS for worker in workers.values() if worker):
        return None
    for entry in entries("loss_variants").values():
        found: Variant | None = load(entry)(top, workers)
        return found
    sections: list[Top | Worker] = [top, *filter(None, workers.values())]
    for section in sections:
        if section.pg_variant is not None:
            section.diag.error("pg_variant", "selects a loss of roll_opd/extras, which is not installed; remove it")
    return None


def _loss(top: Top, row: Algorithm | None, variant: Variant | None) -> dict[str, Any]:
    """Return the keys that follow from the policy loss. An algorithm, a key or a pg_variant selects the policy loss."""
    ours = top.policy_loss
    if ours is not None and not top.diag.is_one_of("policy_loss", ours, POLICY_LOSSES.builtin):
        return {}
    chosen = {"policy_loss_fn": top.policy_loss_fn, "policy_loss": ours}
    if variant is not None:
        chosen[variant.key] = variant.name
    named = {key: name for key, name in chosen.items() if name is not None}
    if len(set(named.values())) > 1:
        top.diag.error(next(iter(named)), f"contradicts {', '.join(list(named)[1:])}; keep only one of these keys")
        return {}
    key, name = next(iter(named.items()), ("algorithm_type", row.policy_loss if row else None))
    given = dict(top.policy_loss_fn_args)
    if top.importance_sampling == "seq" and variant is not None and variant.is_of_role:
        top.diag.warn(
            "importance_sampling", "seq has no effect, because ROLL's ActorPGWorker also computes ratios per token"
        )
    elif top.importance_sampling == "seq":
        name = name or "ppo"
        given = {"ratio_type": "sequence", **given}
        if name != "ppo":
            top.diag.error("importance_sampling", f"seq needs policy loss ppo, but the policy loss is {name}")
    if name is None:
        if given:
            top.diag.error("policy_loss_fn_args", "need a loss; write policy_loss_fn or algorithm_type as well")
        return {}
    if row is not None and name == row.policy_loss:
        given = {**row.policy_loss_args, **given}
    if variant is not None:
        given = {**variant.arguments, **given}
    found = {"loss_agg_mode": given.pop("loss_agg_mode", None)}  # an argument of Trinity-RFT's losses is a key here
    try:
        found["policy_loss"] = POLICY_LOSSES.located(name)
    except AlgorithmError as error:
        top.diag.error(key, str(error))
        return found
    if name in POLICY_LOSSES.builtin:
        facts, defaults = loss_facts(name), POLICY_LOSSES.defaults(name)
        found["loss_agg_mode"] = found["loss_agg_mode"] or facts.loss_agg_mode
        given = _known(top, "policy_loss_fn_args", POLICY_LOSSES, name, given)
        trinity = key == "policy_loss_fn" or (key == "algorithm_type" and row is not None)
        if facts.reads_pg_clip and trinity and "dual_clip_loss" not in top.written:
            given = {"dual_clip": defaults["dual_clip"], **given}  # ROLL's default of these keys is null
    found["policy_loss_fn_args"] = given
    return found


def _advantage(top: Top, row: Algorithm | None, mode: str) -> dict[str, Any]:
    """Return the keys that follow from the advantage estimator. An algorithm or a key selects the estimator."""
    roll, roll_names = top.adv_estimator, (*ADVANTAGES.builtin, *ADVANTAGES.elsewhere)
    if roll is not None and not top.diag.is_one_of("adv_estimator", roll, roll_names):
        return {}
    name = top.advantage_fn or roll or (row.advantage if row else None)
    given = dict(top.advantage_fn_args)
    if top.advantage_fn is not None and roll not in (None, top.advantage_fn):
        other = f"adv_estimator: {roll}{top.diag.where('adv_estimator')}"
        top.diag.error(
            "advantage_fn", f"contradicts {other}; keep only one of these keys, or write adv_estimator=null as well"
        )
        return {}
    if name is None:
        if given:
            top.diag.error(
                "advantage_fn_args", "need an advantage function; write advantage_fn or algorithm_type as well"
            )
        if row is not None:
            return {"adv_estimator": "reinforce"}  # any estimator will do: the loss reads no advantages
        return {} if mode == "pure" else {"adv_estimator": "gae"}  # ROLL's default
    if roll is None:
        name = FUNCTION_ALIASES.get(name, name)
    try:
        path = ADVANTAGES.located(name)
    except AlgorithmError as error:
        top.diag.error("advantage_fn", str(error))
        return {"adv_estimator": name}
    found: dict[str, Any] = {"adv_estimator": path}
    if row is not None and name == row.advantage:
        given = {**row.advantage_args, **given}
    token_defaults = advantage_facts(name).token_defaults
    of_tokens = ("lam", *token_defaults)
    if roll is None:  # if set through ROLL's key, ROLL's defaults apply
        found |= merged_arguments({own: given[own] for own in of_tokens if own in given}, token_defaults)[0]
    given = {own: value for own, value in given.items() if own not in of_tokens}
    if name in ADVANTAGES.builtin:
        given = _known(top, "advantage_fn_args", ADVANTAGES, name, given)
    return {**found, "advantage_fn_args": given}


def _known(top: Top, key: str, registry: Registry[Any], name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with the names that this package uses. Report unknown arguments and wrong types."""
    defaults, ours = registry.defaults(name), dict(merged_arguments(given, {})[0])
    unknown = merged_arguments(given, defaults)[1]
    for argument in unknown:
        takes = f"takes {', '.join(defaults)}" if defaults else "takes none"
        top.diag.error(f"{key}.{argument}", f"is not an argument of {registry.kind} {name}, which {takes}")
    if ours and not unknown:
        for argument, problem in argument_problems(registry.find(name), ours, given_by_us=1):
            top.diag.error(f"{key}.{argument}", problem)
    return ours
