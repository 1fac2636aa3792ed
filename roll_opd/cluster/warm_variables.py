"""Variables of `system_envs` in processes that begin warm: which a fork can still be given, which its server must have.

A fork has an environment of its own, so a variable that is read where it is used counts there as in a new process.
Others are read once, as the interpreter starts or a library is imported: the warm server has them before it imports,
where all roles have the same value. A role with another value begins cold.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from roll_opd.cluster.preloaded import ENGINES, MEGATRON
from roll_opd.plan import RunPlan

# names, or the beginning of names, that nothing reads while the server imports: communication, Ray (which the server
# leaves to its forks), trackers (which the driver alone imports)
READ_AT_USE = (
    *("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "RAY_", "MASTER_"),
    *("WANDB_", "SWANLAB_", "MLFLOW_", "TOKENIZERS_PARALLELISM"),
)
APPLIED = ("OMP_NUM_THREADS", "TMPDIR")  # by `warm_worker` in the fork
OF_VLLM = "VLLM_"  # read as vLLM is imported, which only the server for engines does, once the plan is known


def read_at_import(variables: Mapping[str, Any]) -> dict[str, str]:
    """Return those that a server must have from its start."""
    return {
        name: str(value) for name, value in variables.items() if not name.startswith((*READ_AT_USE, *APPLIED, OF_VLLM))
    }


def needed(kind: str, variables: Mapping[str, Any]) -> dict[str, str]:
    """Return those that a server of `kind` must have for its forks to be what new processes would be."""
    of_vllm = {name: str(value) for name, value in variables.items() if name.startswith(OF_VLLM)}
    return read_at_import(variables) | (of_vllm if kind == ENGINES else {})


def of_servers(plan: RunPlan) -> dict[str, dict[str, str]]:
    """Return the variables of the server for Megatron's roles and of that for engines: what all their roles share."""
    megatron, engines = ([role.env for role in roles.values()] for roles in (plan.megatron_roles(), _engines(plan)))
    from_start = _shared([read_at_import({**plan.env, **env}) for env in (*megatron, *engines)])
    of_vllm = _shared([needed(ENGINES, {**plan.env, **env}) for env in engines])
    later = {name: value for name, value in of_vllm.items() if name.startswith(OF_VLLM)}
    return {MEGATRON: from_start, ENGINES: from_start | later}


def cold_roles(plan: RunPlan, served: Mapping[str, Mapping[str, str]]) -> dict[str, list[str]]:
    """Return the roles that begin cold, each with the variables that its server does not have as the role has them."""
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
