"""Plan the objective of a run with rollouts, and the correction of log-prob differences between the engines.

`expand` fills in unset keys with the values that follow from `algorithm_type`, from keys of Trinity-RFT, and from the
mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from roll_opd.base.entry_points import entries, load
from roll_opd.base.frozen import FrozenDict
from roll_opd.base.registry import Registry, argument_problems
from roll_opd.config.plan import CorrectionPlan, EngineCheckPlan, ObjectivePlan, TokenFilterPlan
from roll_opd.config.roll_keys import PG_KEYS
from roll_opd.config.schema import (
    DistillationKeys,
    ImportanceWeight,
    ObjectiveKeys,
    ReinforcementKeys,
    Section,
    StepKeys,
    TokenFilter,
    Top,
    Worker,
    changed,
    keys_of,
    shared,
)
from roll_opd.objective.algorithms import (
    EXPERT_DATA_RATIO,
    FUNCTION_ALIASES,
    KL_LOSS_COEF,
    KL_PENALTIES,
    ROLL_LOSS_AGG_MODE,
    Algorithm,
    advantage_facts,
    algorithm,
    loss_facts,
    merged_arguments,
)
from roll_opd.objective.registry import ADVANTAGES, OPD_ADVANTAGES, POLICY_LOSSES, AlgorithmError

# keys that are filled in even if they are set
RESOLVED = ("policy_loss", "adv_estimator", "policy_loss_fn_args", "advantage_fn_args")
# keys that ROLL does not have and that select a loss
NAMES_OF_A_LOSS = frozenset({"algorithm_type", "policy_loss_fn", "policy_loss"})
ROLL_CLIP = 0.2  # ROLL's default of pg_clip_low and pg_clip_high
LEVELS = ("mean_cal_level", "std_cal_level")  # arguments of advantages that norm_mean_type and norm_std_type set
# default (lower, upper) as in ROLL (tis), and as in verl and rLLM (icepop)
BOUNDS = {"tis": (None, 1.2), "icepop": (0.5, 5.0)}


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
        return load(entry)(top, workers)
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
        top.diag.warn("importance_sampling", "seq has no effect, as ROLL's ActorPGWorker has ratios per token")
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
        top.diag.error("advantage_fn", f"contradicts {other}; keep only one, or write adv_estimator=null as well")
        return {}
    if name is None:
        if given:
            top.diag.error("advantage_fn_args", "need an advantage; write advantage_fn or algorithm_type as well")
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


def objective_plan(top: Top, mode: str, updates: int, vocab_size: int, tested: EngineCheckPlan | None) -> ObjectivePlan:
    """Return the objective of a run with rollouts.

    Args:
        updates: number of optimizer updates per step.
        vocab_size: number of token ids that student and teachers share.
        tested: test of the engine's samples.
    """
    assert top.policy_loss
    pure = mode == "pure"
    low, high = _clip_range(top)
    clips = {
        "clip_low": low,
        "clip_high": high,
        "dual_clip": 1 + 2 * top.pg_clip if top.dual_clip_loss is True else top.dual_clip_loss or None,  # as in ROLL
    }
    reads_clips = top.policy_loss in POLICY_LOSSES.builtin and loss_facts(top.policy_loss).reads_pg_clip
    read = read_correction(top)
    has_divergence = mode != "rl" and top.opd_objective != "sampled"
    own_clips = {
        "pg_clip_low": None if low == top.pg_clip else low,
        "pg_clip_high": None if high == top.pg_clip else high,
    }
    keys = shared(ObjectiveKeys, top) | own_clips
    keys["opd_advantage_fn_args"] = FrozenDict(top.opd_advantage_fn_args)
    if mode != "rl" and top.opd_advantage_fn != "reverse_kl":
        keys["opd_advantage_fn"] = OPD_ADVANTAGES.located(top.opd_advantage_fn)  # which the workers can import
    off = {*(keys_of(ReinforcementKeys) if pure else ()), *(() if has_divergence else keys_of(DistillationKeys))}
    plan = ObjectivePlan(
        **{key: value for key, value in keys.items() if key not in off},
        policy_loss=top.policy_loss,
        policy_loss_args=FrozenDict({**(clips if reads_clips else {}), **top.policy_loss_fn_args}),
        dual_clip=clips["dual_clip"],
        loss_agg_mode=top.loss_agg_mode or ROLL_LOSS_AGG_MODE,
        loss_normaliser=float(top.response_tokens or 0),
        opd_vocab_size=vocab_size if has_divergence else None,
        correction=read,
        max_age=top.async_generation_ratio,
        engine_check=tested,
        # a correction compares log-probs of the weights before the update with the sampling engine's log-probs
        recompute_old_logprobs=updates > 1 or top.enable_old_logprobs_recompute or read is not None,
    )
    return replace(plan, gamma=0.0) if pure else _with_reward(plan, top)


def _with_reward(plan: ObjectivePlan, top: Top) -> ObjectivePlan:
    """Return the objective with the part that the reward needs: advantages, and KL to the reference policy."""
    assert top.adv_estimator
    name, mean, std = top.adv_estimator, top.norm_mean_type, top.norm_std_type
    if name == "grpo":  # grpo compares within a group by definition; an explicit null switches that off
        mean = mean if "norm_mean_type" in top.written else "group"
        std = std if "norm_std_type" in top.written else "group"
    taken = taken_by(name)
    levels = dict(zip(LEVELS, (mean, std), strict=True)) if taken.issuperset(LEVELS) else {}
    of_steps = {key: getattr(top, key) for key in sorted(taken.intersection(keys_of(StepKeys)))}
    arguments = {**levels, **of_steps, **top.advantage_fn_args}
    token_kl = top.init_kl_coef if top.add_token_level_kl else 0.0
    return replace(
        plan,
        adv_estimator=name,
        advantage_args=FrozenDict(arguments),
        norm_mean_type=mean,
        norm_std_type=std,
        kl_loss=plan.kl_loss if top.kl_loss_fn in (None, "none") else top.kl_loss_fn,
        kl_loss_coef=plan.kl_loss_coef if top.use_kl_loss else 0.0,
        kl_penalty=KL_PENALTIES.get(plan.kl_penalty, plan.kl_penalty),
        init_kl_coef=token_kl,
        target_kl=plan.target_kl if token_kl else None,
        # rewards per token need log-probs from before the update
        recompute_old_logprobs=plan.recompute_old_logprobs or bool(token_kl),
    )


def _clip_range(top: Top) -> tuple[float, float]:
    """Return (low, high): how far the ratio may be below and above 1 before it is clipped.

    Both are `pg_clip`, unless `pg_clip_low` and `pg_clip_high` apply. These two keys apply if `use_pg_clip_range` is
    true, as in ROLL; their default is then 0.2. They also apply if `use_pg_clip_range` is unset and the loss is
    selected by a key that ROLL does not have; their default is then `pg_clip`.
    """
    if not _reads_clip_range(top):
        return top.pg_clip, top.pg_clip
    other = ROLL_CLIP if top.use_pg_clip_range else top.pg_clip
    low, high = top.pg_clip_low, top.pg_clip_high
    return other if low is None else low, other if high is None else high


def _reads_clip_range(top: Top) -> bool:
    if top.use_pg_clip_range is not None:
        return top.use_pg_clip_range
    return not NAMES_OF_A_LOSS.isdisjoint(top.written)


def check_clip_range(top: Top) -> None:
    written = {key: value for key in ("pg_clip_low", "pg_clip_high") if (value := getattr(top, key)) is not None}
    if written and not _reads_clip_range(top) and set(written.values()) != {top.pg_clip}:
        shown = ", ".join(f"{key} {value:g}" for key, value in written.items())
        top.diag.warn(
            next(iter(written)),
            f"{shown} have no effect without use_pg_clip_range: true, as in ROLL; pg_clip {top.pg_clip:g} applies",
        )


def taken_by(advantage: str | None) -> frozenset[str]:
    """Return the names of a built-in advantage's arguments; for a user's advantage, the result is empty."""
    return frozenset(ADVANTAGES.defaults(advantage)) if advantage in ADVANTAGES.builtin else frozenset()


def check_correction(top: Top, mode: str) -> None:
    """Refuse a train_infer_correction that contradicts itself, has no effect, or removes every token."""
    correction = top.train_infer_correction
    weight = correction.is_weight
    if weight.enabled:
        if not weight.detach:
            weight.diag.unused("detach")  # log-probs from before the update have no gradient
        if weight.method == "tis" and weight.lower_bound is not None:
            weight.diag.error("lower_bound", "tis has no lower bound; remove this key, or write method: icepop")
        _check_order(weight, *_bounds(weight))
    for section in (weight, *correction.filters):
        if section.written and "enabled" not in section.written:
            section.diag.note("", "has no effect without enabled: true")
    for rule in correction.filters:
        filters = _filters(rule)
        if rule.enabled and not filters:
            rule.diag.note("", "removes no token, as no bound is enabled")
        for read in filters:
            _check_order(rule, read.low, read.high)
    if mode == "pure" and top.opd_objective != "sampled":
        nothing = f"opd_objective: {top.opd_objective} in pure distillation has no policy loss"
        if weight.enabled:
            correction.diag.error("is_weight", f"{nothing}, which is_weight multiplies; use filters instead")
        if correction.negatives_delta is not None:
            correction.diag.error("negatives_delta", f"{nothing} and no advantages; use filters instead")
    elif correction.negatives_delta is not None and not loss_facts(top.policy_loss).reads_advantages:
        correction.diag.error("negatives_delta", f"policy loss {top.policy_loss} reads no advantages; use filters")


def read_correction(top: Top) -> CorrectionPlan | None:
    """Return the plan of the enabled correction, or None if no correction is enabled."""
    correction = top.train_infer_correction
    filters = tuple(read for rule in correction.filters for read in _filters(rule))
    weight, delta = correction.is_weight, correction.negatives_delta
    if weight.enabled:
        low, high = _bounds(weight)
        return CorrectionPlan(weight.method, weight.weight_type, low, high, filters, delta)
    return CorrectionPlan(filters=filters, negatives_delta=delta) if filters or delta else None


def _bounds(weight: ImportanceWeight) -> tuple[float | None, float | None]:
    """Return (lower, upper), the bounds of an importance weight.

    A key that is written as null means that there is no bound. A key that is not written has its default.
    """
    low, high = BOUNDS[weight.method]
    return (
        weight.lower_bound if "lower_bound" in weight.written else low,
        weight.upper_bound if "upper_bound" in weight.written else high,
    )


def _filters(rule: TokenFilter) -> list[TokenFilterPlan]:
    found = []
    if rule.enabled and rule.ratio_enabled:
        found.append(TokenFilterPlan("ratio", rule.agg_type, rule.ratio_low, rule.ratio_high))
    if rule.enabled and rule.diff_enabled:
        found.append(TokenFilterPlan("difference", rule.agg_type, rule.diff_low, rule.diff_high))
    return [one for one in found if (one.low, one.high) != (None, None)]


def _check_order(section: Section, low: float | None, high: float | None) -> None:
    if low is not None and high is not None and low >= high:
        section.diag.error("", f"no token is between the lower bound {low:g} and the upper bound {high:g}; swap them")
