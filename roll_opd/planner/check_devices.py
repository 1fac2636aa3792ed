"""Checks of devices: existence, sharing, and memory."""

from collections.abc import Sequence
from itertools import combinations

from roll_opd.config.diagnostics import Diagnostics
from roll_opd.config.plan import RunPlan
from roll_opd.config.schema import Run, Worker
from roll_opd.models.device_phases import members_on_gpus
from roll_opd.models.memory import device_memory, readable_bytes
from roll_opd.planner.strategies import OPTIONS, short_devices


def nodes(roles: list[Worker], top: Run) -> int:
    """Return the number of nodes of a run.

    This is num_nodes, or the number of nodes in the device mappings if it is larger, as in ROLL.
    """
    last = max((max(role.devices) for role in roles if role.devices), default=0)
    return max(top.num_nodes or 1, last // top.num_gpus_per_node + 1)


def check_devices(roles: list[Worker], top: Run) -> None:
    """Check that all devices exist. The devices of two roles must be equal, disjoint or nested."""
    total = (top.num_nodes or nodes(roles, top)) * top.num_gpus_per_node
    known = [(role, set(role.devices)) for role in roles if role.devices]
    for role, devices in known:
        if max(devices) >= total:
            role.diag.unsupported(  # ROLL's YAML files use devices beyond num_nodes, which ROLL overwrites
                "device_mapping",
                f"device {max(devices)} does not exist: num_nodes {top.num_nodes} x num_gpus_per_node"
                f" {top.num_gpus_per_node} gives devices 0 to {total - 1}; raise or remove num_nodes, or change"
                " device_mapping",
            )
        layout = role.layout
        if role.job == "rollout" and layout and layout.tp > top.num_gpus_per_node:
            role.diag.unsupported(
                f"{OPTIONS}.tensor_parallel_size",
                f"{layout.tp}: engines on several nodes of {top.num_gpus_per_node} devices are not available yet; write"
                f" at most {top.num_gpus_per_node}",
            )
        elif layout and (apart := _apart(role.devices or (), layout.tp, top.num_gpus_per_node)):
            where = f"devices {short_devices(apart)} are on several nodes of {top.num_gpus_per_node} devices each"
            if role.job == "rollout":
                role.diag.unsupported(
                    "device_mapping",
                    f"an engine's {where}, which is not available yet; choose devices of a single node",
                )
            else:
                role.diag.note(
                    "device_mapping",
                    f"{where} but form one tensor-parallel group, which communicates in every layer; this is slow over"
                    " a network",
                )
    for (one, mine), (other, theirs) in combinations(known, 2):
        shared = mine & theirs
        if shared and shared != mine and shared != theirs:
            here, there, both = (short_devices(sorted(devices)) for devices in (theirs, mine, shared))
            other.diag.error(
                "device_mapping",
                f"{here} and {one.path}'s {there} have only {both} in common; make them equal, nested or disjoint",
            )


def _apart(devices: Sequence[int], tp: int, per_node: int) -> Sequence[int]:
    """Return the first group of `tp` consecutive devices that spans several nodes, or () if there is none."""
    groups = (devices[start : start + tp] for start in range(0, len(devices), tp))
    return next((group for group in groups if len({device // per_node for device in group}) > 1), ())


def check_memory(plan: RunPlan, diag: Diagnostics) -> None:
    """Refuse devices that are too small for the resident memory. Warn if activations would fill a device."""
    if plan.device_memory_gb is None:
        return
    limit = int(plan.device_memory_gb * 2**30)
    for computing in (False, True):
        needs = device_memory(plan, limit, computing=computing)
        full = [device for device, size in needs.items() if size > limit]
        if full:
            most = max(full, key=needs.__getitem__)
            names = " and ".join(name for name, role in plan.roles().items() if most in role.devices)
            all_there = "even in turns" if members_on_gpus(plan) else "since all of them stay in memory"
            what = all_there if computing else "without any activations"
            text = (
                f"devices {short_devices(full)} have {plan.device_memory_gb:g} GiB each and need about"
                f" {readable_bytes(needs[most])} for {names}, {what}; give the roles separate devices, split them"
                f" further, or lower gpu_memory_utilization{' or the tokens of a micro-batch' if computing else ''}"
            )
            return diag.add_warning(text) if computing else diag.unsupported_here("device_memory_gb", text)
    return None
