"""Routing replay: whose routes of experts are recorded and replayed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from roll_opd.config.schema import Worker

if TYPE_CHECKING:
    from roll_opd.planner.roles import Role

KEY = "router_replay.mode"


def check_turns(workflow: str | None, train: Role | None) -> None:
    """Refuse replay of what a workflow or an environment makes, whose turns do not bring their routes."""
    if workflow and train and train.worker.router_replay.mode != "disable":
        train.worker.diag.error(KEY, "routes of workflows and environments are not recorded yet; use disable")


def check(workers: Iterable[Worker], train: Role | None, infer: Role | None) -> None:
    """Refuse replay where nobody samples, of other roles than the student's, and of a model without experts.

    `train` and `infer` are the student's; None: it learns from rows, or could not be read.
    """
    students = [role.worker for role in (train, infer) if role]
    for worker in workers:
        if worker.router_replay.mode != "disable" and not any(worker is student for student in students):
            worker.diag.error(KEY, "routes are those of the student that samples; no other role has any: use disable")
    if not (train and infer):
        return
    asked, returned = train.worker.router_replay.mode, infer.worker.router_replay.mode
    if asked != returned:
        both = f"{train.path}.{KEY} is {asked}, {infer.path}.{KEY} {returned}"
        train.worker.diag.error(KEY, f"{both}: what one replays the other records, so write the same in both")
    elif asked != "disable" and train.info and not train.info.experts:
        train.worker.diag.error(KEY, f"{train.info.path.name} has no experts to which tokens are sent; use disable")
