"""Read ROLL's key `pg_variant`, which names the policy loss."""

from collections.abc import Mapping
from typing import Any

from roll_opd.config.schema import MIXED_ROLES, PURE_ROLES, Top, Worker
from roll_opd.planner.objective_plan import Variant

PG_WORKER = "actor_pg_worker"  # part of the dotted path of ROLL's classes that read pg_variant
# ROLL's pg_variant -> arguments whose defaults differ from the loss's
PG_VARIANTS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "ppo": {},
    "tis": {},
    "topr": {"sign_of": "reward"},
    "cispo": {"clip_low": 0.1, "clip_high": 0.1},
    "kimi15": {},
}


def read_variant(top: Top, workers: Mapping[str, Worker | None]) -> Variant | None:
    """Return the policy loss that `pg_variant` selects; None if the key is not set or has no effect.

    ROLL reads `pg_variant` only in the trained role, and only if `worker_cls` of this role is an ActorPGWorker. A
    `pg_variant` at the top level is only a variable of the YAML file in ROLL. Here it selects the loss if the role sets
    neither `pg_variant` nor `worker_cls`.
    """
    learner = next((name for name in (PURE_ROLES[0], MIXED_ROLES[0]) if workers.get(name) is not None), "")
    for path, worker in workers.items():
        if worker is not None:
            _check_class(worker, path == learner)
    role = workers.get(learner)
    if role is None or (role.worker_cls is None and role.pg_variant is None):
        if top.pg_variant is None or not _is_known(top, top.pg_variant):
            return None
        top.diag.warn(
            "pg_variant",
            f"{top.pg_variant} is the policy loss; ROLL reads pg_variant only in actor_train, with an ActorPGWorker"
            " as worker_cls",
        )
        return Variant("pg_variant", top.pg_variant, PG_VARIANTS[top.pg_variant])
    found = _of_role(role)
    if top.pg_variant not in (None, found.name if found else None):
        top.diag.warn("pg_variant", f"{top.pg_variant} has no effect, as in ROLL: it is a variable of the YAML file")
    return found


def _of_role(worker: Worker) -> Variant | None:
    name = worker.pg_variant
    weights = {"positive_weight": worker.topr_positive_weight, "negative_weight": worker.topr_negative_weight}
    if PG_WORKER not in (worker.worker_cls or ""):
        if name is not None:
            worker.diag.warn(
                "pg_variant",
                f"{name} has no effect, as in ROLL, where it needs worker_cls"
                " roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker; the other keys set the loss",
            )
        return None
    if name is None:
        worker.diag.error("pg_variant", f"is missing; ROLL's ActorPGWorker needs one of {', '.join(PG_VARIANTS)}")
        return None
    if not _is_known(worker, name):
        return None
    return Variant(worker.diag.at("pg_variant"), name, {**PG_VARIANTS[name], **(weights if name == "topr" else {})})


def _is_known(section: Top | Worker, name: str) -> bool:
    if name not in PG_VARIANTS:
        section.diag.error("pg_variant", f"{name!r} is unknown; use one of {', '.join(PG_VARIANTS)}")
    return name in PG_VARIANTS


def _check_class(worker: Worker, trainable: bool) -> None:
    """Refuse a worker class of the user, and report keys of ROLL that have no effect."""
    if worker.worker_cls is not None and not worker.worker_cls.startswith("roll."):
        worker.diag.unsupported(
            "worker_cls",
            f"{worker.worker_cls} is not a class of ROLL, and user worker classes are not supported; write a"
            " policy_loss_fn, an advantage_fn or a pipeline of your own (docs/extending.md), and remove the key",
        )
    elif worker.worker_cls is not None and not (trainable and PG_WORKER in worker.worker_cls):
        worker.diag.unused("worker_cls")
