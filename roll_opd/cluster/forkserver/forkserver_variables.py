"""Split `system_envs` into variables set in a forked worker, and variables that the fork server needs at import.

A fork has its own environment, so variables that are read on use take effect there. Others are read once, at the start
of the interpreter or the import of a library: the server sets them before its imports if all roles have the same value.
A role with another value starts without preloading.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.cluster.forkserver.forkserver_main import ENGINES, MEGATRON
from roll_opd.config.plan import RunPlan

# prefixes of variables that no import of the server reads: communication, Ray (imported by the forks), trackers
# (imported by the driver)
READ_AT_USE = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "RAY_", "MASTER_"),
    *("WANDB_", "SWANLAB_", "MLFLOW_", "TOKENIZERS_PARALLELISM"),
)
APPLIED = ("OMP_NUM_THREADS", "TMPDIR")  # set by `forkserver_worker` in the fork
VLLM_PREFIX = "VLLM_"  # read when vLLM is imported, only in the engines' server


def read_at_import(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a server needs from its start."""
    return {
        name: str(value)
        for name, value in variables.items()
        if not name.startswith((*READ_AT_USE, *APPLIED, VLLM_PREFIX))
    }


def needed(kind: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables that a server of `kind` must set before its imports, for forks equal to new processes."""
    of_vllm = {name: str(value) for name, value in variables.items() if name.startswith(VLLM_PREFIX)}
    return read_at_import(variables) | (of_vllm if kind == ENGINES else {})


def of_servers(plan: RunPlan) -> dict[str, dict[str, str]]:
    """Return the import-time variables of Megatron's and of the engines' server: those shared by all their roles."""
    megatron, engines = ([role.env for role in roles.values()] for roles in (plan.megatron_roles(), _engines(plan)))
    from_start = _shared([read_at_import({**plan.env, **env}) for env in (*megatron, *engines)])
    of_vllm = _shared([needed(ENGINES, {**plan.env, **env}) for env in engines])
    later = {name: value for name, value in of_vllm.items() if name.startswith(VLLM_PREFIX)}
    return {MEGATRON: from_start, ENGINES: from_start | later}


def cold_roles(plan: RunPlan, served: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the roles that start without preloading, each with the variables that differ from its server's."""
    roles = [(name, MEGATRON, role.env) for name, role in plan.megatron_roles().items()]
    roles += [(name, ENGINES, role.env) for name, role in _engines(plan).items()]
    wanted = {name: (needed(kind, {**plan.env, **env}), served[kind]) for name, kind, env in roles}
    return {
        role: sorted({name for name, _ in own.items() ^ has.items()})
        for role, (own, has) in wanted.items()
        if own != has
    }


def _engines(plan: RunPlan) -> Mapping[str, Any]:
    return plan.inference_roles()


def _shared(environments: Sequence[Mapping[str, str]]) -> dict[str, str]:
    if not environments:
        return {}
    return dict(set.intersection(*(set(each.items()) for each in environments)))
