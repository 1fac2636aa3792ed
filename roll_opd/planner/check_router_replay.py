"""Checks of routing replay: where routes are recorded, and which model has them."""

from roll_opd.config.schema import Worker
from roll_opd.planner.validate_sections import Sections

ROUTER_REPLAY = "router_replay.mode"


def check_replay_of_turns(workflow: str | None, train: Worker | None) -> None:
    """Refuse routing replay in workflows, because routes are not recorded for their turns."""
    if workflow and train and train.router_replay.mode != "disable":
        train.diag.error(
            ROUTER_REPLAY, "the routing in workflows and environments is not recorded yet; write mode: disable"
        )


def check_replay(sections: Sections, supervised: bool) -> None:
    """Refuse routing replay where it cannot work.

    It needs a rollout, the student's roles, the same mode in both of these roles, and a model with experts.
    """
    train, infer = (None, None) if supervised else (sections.train, sections.infer)
    for worker in sections.written():
        if worker.router_replay.mode != "disable" and worker is not train and worker is not infer:
            worker.diag.error(ROUTER_REPLAY, "only a student that samples has recorded routes; write mode: disable")
    if not (train and infer):
        return
    written, returned = train.router_replay.mode, infer.router_replay.mode
    if written != returned:
        both = f"{train.path}.{ROUTER_REPLAY} is {written}, {infer.path}.{ROUTER_REPLAY} {returned}"
        train.diag.error(ROUTER_REPLAY, f"{both}; use the same mode in both, as one replays what the other records")
    elif written != "disable" and train.info and not train.info.experts:
        train.diag.error(ROUTER_REPLAY, f"{train.info.path.name} has no experts to replay; write mode: disable")
