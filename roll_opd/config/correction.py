"""Checks and reads `train_infer_correction`: what is done about the two engines' log-probs being apart."""

from dataclasses import replace

from roll_opd.algorithms.table import loss_facts
from roll_opd.config.errors import Diagnostics
from roll_opd.config.plan import CorrectionPlan, TokenFilterPlan
from roll_opd.config.schema import ImportanceWeight, Section, TokenFilter, Top

KEY = "train_infer_correction"
# what nobody writes: ROLL's bounds, and those that verl and rLLM give for IcePop
UPPER_BOUNDS = {"tis": 1.2, "icepop": 5.0}
ICEPOP_LOWER_BOUND = 0.5
RATIOS, DIFFERENCES = (0.8, 1.2), (-0.2, 0.2)


def check(top: Top, mode: str, diagnostics: Diagnostics) -> None:
    """Refuse what contradicts itself, and what would change nothing or leave nothing to learn from."""
    correction = top.train_infer_correction
    weight = correction.is_weight
    if weight.enabled:
        if not weight.detach:
            diagnostics.ignore(f"{KEY}.is_weight.detach")  # log-probs from before the update have no gradient
        if weight.method == "tis" and weight.lower_bound is not None:
            diagnostics.problem(
                f"{KEY}.is_weight.lower_bound", "truncated weights (tis) have an upper bound only; write method: icepop"
            )
        _check_order(f"{KEY}.is_weight", _weight_bounds(weight), diagnostics)
    for number, rule in enumerate(correction.filters):
        if rule.enabled and not _filters(rule):
            diagnostics.warn(f"{KEY}.filters.{number}: leaves nothing out, as it has no bound that is enabled")
        for read in _filters(rule):
            _check_order(f"{KEY}.filters.{number}", (read.low, read.high), diagnostics)
    policy_loss = top.policy_loss or ("importance_sampling" if mode == "pure" else "ppo")
    if mode == "pure" and top.opd_objective != "sampled":
        nothing = f"opd_objective: {top.opd_objective} in pure distillation has no policy loss"
        if weight.enabled:
            diagnostics.problem(f"{KEY}.is_weight", f"{nothing}, which is what the weights multiply; use filters")
        if correction.negatives_delta is not None:
            diagnostics.problem(f"{KEY}.negatives_delta", f"{nothing} and no advantages; use filters")
    elif correction.negatives_delta is not None and not loss_facts(policy_loss).reads_advantages:
        diagnostics.problem(
            f"{KEY}.negatives_delta", f"policy loss {policy_loss} reads no advantages, so none is negative; use filters"
        )


def read(top: Top) -> CorrectionPlan | None:
    """Return what is switched on; None where nothing is."""
    correction = top.train_infer_correction
    filters = tuple(read for rule in correction.filters for read in _filters(rule))
    weight = correction.is_weight
    if not (weight.enabled or filters or correction.negatives_delta):
        return None
    found = CorrectionPlan(filters=filters, negatives_delta=correction.negatives_delta)
    if not weight.enabled:
        return found
    low, high = _weight_bounds(weight)
    return replace(found, weight=weight.method, level=weight.weight_type, low=low, high=high)


def _weight_bounds(weight: ImportanceWeight) -> tuple[float | None, float | None]:
    lowest = ICEPOP_LOWER_BOUND if weight.method == "icepop" else None
    return _bound(weight, "lower_bound", lowest), _bound(weight, "upper_bound", UPPER_BOUNDS[weight.method])


def _filters(rule: TokenFilter) -> list[TokenFilterPlan]:
    found = []
    if rule.enabled and rule.ratio_enabled:
        low, high = _bound(rule, "ratio_low", RATIOS[0]), _bound(rule, "ratio_high", RATIOS[1])
        found.append(TokenFilterPlan("ratio", rule.agg_type, low, high))
    if rule.enabled and rule.diff_enabled:
        low, high = _bound(rule, "diff_low", DIFFERENCES[0]), _bound(rule, "diff_high", DIFFERENCES[1])
        found.append(TokenFilterPlan("difference", rule.agg_type, low, high))
    return [one for one in found if (one.low, one.high) != (None, None)]


def _bound(section: Section, key: str, default: float | None) -> float | None:
    """What is written, null (no bound) included; else the default."""
    return getattr(section, key) if key in section.written else default


def _check_order(key: str, bounds: tuple[float | None, float | None], diagnostics: Diagnostics) -> None:
    low, high = bounds
    if low is not None and high is not None and low >= high:
        diagnostics.problem(
            key, f"no token is between a lower bound of {low:g} and an upper one of {high:g}; swap them"
        )
