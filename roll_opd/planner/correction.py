"""Checks and reads `train_infer_correction`: what is done about the two engines' log-probs being apart."""

from collections.abc import Mapping

from roll_opd.algorithms.table import loss_facts
from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import CorrectionPlan, TokenFilterPlan
from roll_opd.config.schema import ImportanceWeight, Section, TokenFilter, Top

# (lower, upper) where nobody writes them: ROLL's bound, and those that verl and rLLM give for IcePop
BOUNDS = {"tis": (None, 1.2), "icepop": (0.5, 5.0)}


def check(top: Top, mode: str) -> None:
    """Refuse what contradicts itself, and what would change nothing or leave nothing to learn from."""
    correction = top.train_infer_correction
    weight = correction.is_weight
    if weight.enabled:
        if not weight.detach:
            weight.diag.unused("detach")  # log-probs from before the update have no gradient
        if weight.method == "tis" and weight.lower_bound is not None:
            weight.diag.error("lower_bound", "truncated weights (tis) have an upper bound only; write method: icepop")
        _check_order(weight, *_bounds(weight))
    for section in (weight, *correction.filters):
        if section.written and "enabled" not in section.written:
            section.diag.note("", "has no effect without enabled: true")
    for rule in correction.filters:
        filters = _filters(rule)
        if rule.enabled and not filters:
            rule.diag.note("", "leaves nothing out, as it has no bound that is enabled")
        for read in filters:
            _check_order(rule, read.low, read.high)
    if mode == "pure" and top.opd_objective != "sampled":
        nothing = f"opd_objective: {top.opd_objective} in pure distillation has no policy loss"
        if weight.enabled:
            correction.diag.error("is_weight", f"{nothing}, which is what the weights multiply; use filters")
        if correction.negatives_delta is not None:
            correction.diag.error("negatives_delta", f"{nothing} and no advantages; use filters")
    elif correction.negatives_delta is not None and not loss_facts(top.policy_loss).reads_advantages:
        correction.diag.error(
            "negatives_delta", f"policy loss {top.policy_loss} reads no advantages, so none is negative; use filters"
        )


def check_quantised(options: Mapping[str, object], diag: Diagnostics, top: Top) -> None:
    """Warn of inference engines whose `options` round the student's weights, where nothing is done about it."""
    key = "quantization"
    if options.get(key) and read(top) is None:
        diag.note(
            f"strategy_args.strategy_config.{key}",
            f"{options[key]} samples from rounded weights, whose log-probs are not those of the student that learns;"
            " switch train_infer_correction on (is_weight or filters)",
        )


def read(top: Top) -> CorrectionPlan | None:
    """Return what is switched on; None where nothing is."""
    correction = top.train_infer_correction
    filters = tuple(read for rule in correction.filters for read in _filters(rule))
    weight, delta = correction.is_weight, correction.negatives_delta
    if weight.enabled:
        low, high = _bounds(weight)
        return CorrectionPlan(weight.method, weight.weight_type, low, high, filters, delta)
    return CorrectionPlan(filters=filters, negatives_delta=delta) if filters or delta else None


def _bounds(weight: ImportanceWeight) -> tuple[float | None, float | None]:
    """Return what is written, null (no bound) included; else what the method has."""
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
        section.diag.error("", f"no token is between a lower bound of {low:g} and an upper one of {high:g}; swap them")
