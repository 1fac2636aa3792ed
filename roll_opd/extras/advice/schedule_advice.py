"""Find the age bound and the split of devices that give the shortest step.

The costs of a step are measured in a run, stated by the user, or estimated from the rates of a card. `roll-opd plan`
prints the advice.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from roll_opd.base.failures import ConfigError
from roll_opd.base.terminal import table, wrapped
from roll_opd.config.plan import RunPlan
from roll_opd.extras.advice.async_advice import Prediction, Predictor, StepCosts, Work, fastest, spread_of
from roll_opd.extras.advice.card_estimate import Estimate, estimate
from roll_opd.tracking.run_directory import METRICS, read_jsonl

SLOTS = 256  # answers that vLLM samples at the same time by default
WARM_UP = 1  # first steps that are left out, as they compile kernels and fill caches
# phase of `time/*` -> field of `StepCosts`; time in the driver counts as the learner's, since the learner waits
PARTS = {
    "generate": "generate",
    "teacher": "score",
    **dict.fromkeys(("old_logprobs", "values", "train", "reward", "other"), "learn"),
    "weight_sync": "sync",
}
STATED = {"generate": "generate", "teacher": "score", "train": "learn", "weight_sync": "sync"}
NUMBERS = {**STATED, "spread": "spread", "longest": "longest", "fixed": "fixed"}  # of --costs
HOW = "generate=S,teacher=S,train=S,weight_sync=S in seconds per step, and spread=X,longest=X,fixed=X"


@dataclass(frozen=True)
class ScheduleAdvice:
    """The costs, where they come from, and the predictions for each number of devices."""

    costs: StepCosts
    origin: str
    now: Prediction  # prediction for the configuration
    by_devices: Mapping[int, Sequence[Prediction]]
    estimate: Estimate | None = None  # the parts of the costs, if these are estimated

    def to_json(self) -> dict[str, Any]:
        """Return the costs and the predictions as JSON types.

        The costs are in seconds. The predictions are for the configuration, and for each number of devices.
        """
        found = {"estimate": asdict(self.estimate)} if self.estimate else {}
        return found | {
            "costs": {name: getattr(self.costs, field) for name, field in NUMBERS.items()},
            "configuration": asdict(self.now),
            "fastest": {devices: asdict(fastest(found)) for devices, found in self.by_devices.items() if found},
            "predictions": [asdict(one) for found in self.by_devices.values() for one in found],
        }

    def to_text(self, width: int) -> str:
        """Return the costs, a table and the advice as text.

        The table has the fastest split of the devices for each age bound.
        """
        costs = ", ".join(f"{name} {getattr(self.costs, field):.3g} s" for name, field in STATED.items())
        lines = [f"{costs} ({self.origin}); lengths: spread {self.costs.spread:.2g}"]
        rows = [["devices", "engines", "training", "S", "step", "waits", "free slots", "age", "largest"]]
        for found in self.by_devices.values():
            rows += [_cells(one) for one in _by_bound(found)]
        lines += table(rows, width - 2, indent=0)
        lines += [self._sentence(devices, found) for devices, found in self.by_devices.items()]
        schedule = "\n  ".join(["Schedule (simulated)", *lines])
        return wrapped("\n\n".join([*([_estimate_text(self.estimate)] if self.estimate else []), schedule]), width)

    def _sentence(self, devices: int, found: Sequence[Prediction]) -> str:
        if not found:
            return f"{devices} devices cannot be divided into engines and replicas of the student"
        best = fastest(found)
        place = "all devices in turns" if best.is_shared else f"engines on {best.engines}, training on {best.training}"
        return (
            f"fastest on {devices} devices: async_generation_ratio: {best.bound}, {place}: {best.step:.3g} s per"
            f" step, {self.now.step / best.step:.2f} times as fast as this configuration ({self.now.step:.3g} s on"
            f" {self.now.devices})"
        )


def _estimate_text(found: Estimate) -> str:
    lines = [f"{part}: {seconds:.3g} s" for parts in found.parts.values() for part, seconds in parts.items()]
    return "\n  ".join([f"Seconds per step: {found.heading}; responses of full length", *lines])


def advice_for(
    plan: RunPlan, measured: str | None, stated: str | None, devices: str | None, card: str | None = None
) -> ScheduleAdvice | None:
    """Return the advice for a plan, from the options of `roll-opd plan`; None if no costs are given.

    Args:
        plan: the plan of the configuration. The costs were measured or stated for its devices and its batch.
        measured: directory of a run with measured costs.
        stated: costs in the form of `--costs`; stated costs take precedence over measured costs.
        devices: numbers of devices, separated by commas; None means the number of devices in `plan`.
        card: name of a card in `hardware.CARDS`; the costs are estimated from its rates. Stated costs take precedence.

    Raises ConfigError in four cases: the plan has no generation, costs are missing or unreadable, they cannot be
    estimated, or the phases of the measured run overlap.
    """
    if not measured and not stated and card is None:
        if devices:
            raise ConfigError([f"--devices {devices} needs costs; give --card, --measured RUN_DIR or --costs {HOW}"])
        return None
    if measured and card is not None:
        raise ConfigError([f"--card {card} estimates what --measured {measured} has measured; give one of them"])
    numbers = [text.strip() for text in devices.split(",")] if devices else []
    if not all(text.isdecimal() and int(text) for text in numbers):
        raise ConfigError([f"--devices: {devices} are not numbers of devices; give numbers such as 8 or 8,64,512"])
    if plan.rollout is None:
        raise ConfigError([f"the {plan.kind} pipeline generates nothing, so there is no schedule to advise on"])
    found = measured_costs(Path(measured), plan) if measured else {}
    origin = [f"medians of {measured}"] if measured else []
    work, estimated = work_of(plan), None
    if card is not None:
        estimated = estimate(plan, card, work)
        found = {STATED[name]: seconds for name, seconds in estimated.costs.items()} | {"spread": 0.0}
        origin.append(estimated.heading)
    if stated:
        found |= stated_costs(stated)
        origin.append("stated")
    missing = [name for name, field in STATED.items() if field not in found]
    if missing:
        raise ConfigError([f"--costs: the costs {', '.join(missing)} are missing; give {HOW}, or --measured RUN_DIR"])
    costs = StepCosts(**found)
    predictor = Predictor(costs, work)
    now = predictor.predict(work.engines, work.training, plan.async_generation_ratio, is_shared=work.is_shared)
    return ScheduleAdvice(
        costs,
        ", ".join(origin),
        now,
        {
            number: predictor.predictions(number)
            for number in dict.fromkeys([int(text) for text in numbers] or [work.devices])
        },
        estimated,
    )


def work_of(plan: RunPlan) -> Work:
    """Return the batch and the devices of a plan."""
    assert plan.rollout is not None
    engines = set(plan.rollout.devices)
    training = {device for role in plan.megatron_roles().values() for device in role.devices}
    limit = (
        -(-plan.rollout.max_running_requests // plan.rollout.engines) if plan.rollout.max_running_requests else SLOTS
    )
    layout = plan.student.layout
    shared = bool(engines & training)
    return Work(
        engines=len(engines | training) if shared else len(engines),
        training=len(engines | training) if shared else len(training),
        is_shared=shared,
        groups=plan.rollout_batch_size,
        runs=plan.answers_per_prompt,
        slots=plan.training_engines * int(plan.rollout.engine_args.get("max_num_seqs") or limit),
        engine_size=plan.rollout.tp,
        replica_size=layout.tp * layout.pp * layout.cp,
        most_replicas=plan.student.mini_batch_sequences,
    )


def measured_costs(directory: Path, plan: RunPlan) -> dict[str, float]:
    """Return the costs of a step, measured in a run, as fields of `StepCosts`.

    The costs are medians over the steps in `metrics.jsonl`, without the first step. Raises ConfigError if the run has
    fewer than two steps, or if it had async rollouts.
    """
    rows = [row for row in read_jsonl(directory / METRICS) if row.get("time/step") is not None][WARM_UP:]
    if not rows:
        raise ConfigError(
            [f"--measured {directory}: {METRICS} has fewer than two steps; give the directory of a longer run"]
        )
    if any("rollout/async/age_mean" in row for row in rows):
        raise ConfigError(
            [
                f"--measured {directory}: has async rollouts, so the phases overlap; give a run with"
                " async_generation_ratio: 0, or --costs"
            ]
        )
    found = dict.fromkeys(PARTS.values(), 0.0)
    for phase, field in PARTS.items():
        found[field] += median(row.get(f"time/{phase}") or 0.0 for row in rows)
    lengths = [
        row["tokens/response_length/max"] / row["tokens/response_length/mean"]
        for row in rows
        if row.get("tokens/response_length/mean")
    ]
    if lengths:
        found |= {"spread": spread_of(median(lengths), plan.sequences_per_step), "longest": max(lengths)}
    return found


def stated_costs(text: str) -> dict[str, float]:
    """Return the costs that the user states, as fields of `StepCosts`.

    The form of `text` is "name=number,name=number". Raises ConfigError for other text.
    """
    found = {}
    for item in text.split(","):
        name, _, number = item.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if name.strip() not in NUMBERS or not value >= 0 or (name.strip() == "fixed" and value > 1):
            raise ConfigError([f"--costs: {item!r} is not a cost; give {HOW} (fixed from 0 to 1)"])
        found[NUMBERS[name.strip()]] = value
    return found


def _by_bound(found: Sequence[Prediction]) -> list[Prediction]:
    """Return the fastest prediction for each age bound.

    There are two kinds of layouts: all roles take turns on the same devices, or the devices are split. Each kind is
    compared separately.
    """
    kinds = dict.fromkeys((not one.is_shared, one.bound) for one in found)
    return [
        min((one for one in found if (not one.is_shared, one.bound) == kind), key=lambda one: one.step)
        for kind in sorted(kinds)
    ]


def _cells(one: Prediction) -> list[str]:
    split = ["in turns", "in turns"] if one.is_shared else [str(one.engines), str(one.training)]
    shares = [f"{share:.0%}" for share in (one.training_idle, one.engine_idle)]
    return [
        str(one.devices),
        *split,
        str(one.bound),
        f"{one.step:.3g}",
        *shares,
        f"{one.mean_age:.1f}",
        str(one.max_age),
    ]
