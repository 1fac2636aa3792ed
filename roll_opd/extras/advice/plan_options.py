"""The options of `roll-opd plan` that ask for advice on the schedule and on the weight sync."""

import argparse
from typing import TYPE_CHECKING

from roll_opd.commands.main import PlanAdvice

if TYPE_CHECKING:
    from roll_opd.config.plan import RunPlan
    from roll_opd.extras.advice.schedule_advice import ScheduleAdvice
    from roll_opd.extras.advice.wire_estimate import WireEstimate

WIRE = "25"  # GB/s of 200 Gb/s InfiniBand


def _arguments(parser: argparse.ArgumentParser) -> None:
    of_run = "predict step times from a synchronous run of this configuration"
    parser.add_argument("--measured", metavar="RUN_DIR", help=of_run)
    of_costs = (
        "predict step times from seconds per step:"
        " generate=S,teacher=S,train=S,weight_sync=S[,spread=X,longest=X,fixed=X]"
    )
    parser.add_argument("--costs", metavar="COSTS", help=of_costs)
    of_card = "estimate seconds per step from the rates in the data sheet of a card, such as H100"
    parser.add_argument("--card", metavar="CARD", help=of_card)
    of_devices = "predict for these numbers of devices (default: the configuration's)"
    parser.add_argument("--devices", metavar="N[,N]", help=of_devices)


def _advise(plan: "RunPlan", arguments: argparse.Namespace) -> "ScheduleAdvice | None":
    from roll_opd.extras.advice.schedule_advice import advice_for

    return advice_for(plan, arguments.measured, arguments.costs, arguments.devices, arguments.card)


def _wire_arguments(parser: argparse.ArgumentParser) -> None:
    of_wire = f"compute the seconds of a weight sync over a wire of this rate (without a number: {WIRE})"
    parser.add_argument("--wire", metavar="GB/s", nargs="?", const=WIRE, help=of_wire)


def _advise_on_wire(plan: "RunPlan", arguments: argparse.Namespace) -> "WireEstimate | None":
    if arguments.wire is None:
        return None
    from roll_opd.extras.advice.wire_estimate import wire_estimate

    return wire_estimate(plan, arguments.wire)


SCHEDULE = PlanAdvice(_arguments, _advise)
WEIGHT_SYNC = PlanAdvice(_wire_arguments, _advise_on_wire)
