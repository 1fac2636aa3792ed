"""Checks of devices: whether they exist, who shares them, and their memory."""

from itertools import combinations

from roll_opd.config.device_mapping import short_devices
from roll_opd.config.errors import Diagnostics
from roll_opd.config.plan import RunPlan
from roll_opd.config.roles import Role
from roll_opd.config.schema import Run
from roll_opd.config.strategies import OPTIONS
from roll_opd.megatron.memory import device_memory, readable_bytes
from roll_opd.phases import members_on_gpus


def nodes(roles: list[Role], top: Run) -> int:
    """Return num_nodes, or the nodes that the device mappings reach over where those are more, as ROLL does."""
    last = max((max(role.strategy.devices) for role in roles if role.strategy.devices), default=0)
    return max(top.num_nodes or 1, last // top.num_gpus_per_node + 1)


def check_devices(roles: list[Role], top: Run) -> None:
    """Check that devices exist, and that two roles share all, none, or one's all inside the other's."""
    total = (top.num_nodes or nodes(roles, top)) * top.num_gpus_per_node
    known = [(role, set(role.strategy.devices)) for role in roles if role.strategy.devices]
    for role, devices in known:
        if max(devices) >= total:
            role.tell.block(  # ROLL's own YAML reach beyond their num_nodes; ROLL overwrites it
                "device_mapping",
                f"device {max(devices)} does not exist: num_nodes {top.num_nodes} x num_gpus_per_node"
                f" {top.num_gpus_per_node} gives devices 0 to {total - 1}; raise num_nodes, leave it out"
                " or change the mapping",
            )
        layout = role.strategy.layout
        if role.job == "rollout" and layout and layout.tp > top.num_gpus_per_node:
            role.tell.problem(
                f"{OPTIONS}.tensor_parallel_size",
                f"an engine of {layout.tp} devices does not fit into one node of {top.num_gpus_per_node};"
                " use a smaller one",
            )
    for (one, mine), (other, theirs) in combinations(known, 2):
        shared = mine & theirs
        if shared and shared != mine and shared != theirs:
            here, there, both = (short_devices(sorted(devices)) for devices in (theirs, mine, shared))
            other.tell.problem(
                "device_mapping",
                f"devices {here} and {one.path}'s {there} share only {both}; two roles can take turns on the same"
                " devices, lie one inside the other or keep apart, but not overlap in part",
            )


def check_memory(plan: RunPlan, tell: Diagnostics) -> None:
    """Warn of the devices whose roles together need more than a device has."""
    if plan.device_memory_gb is None:
        return
    needs = device_memory(plan, int(plan.device_memory_gb * 2**30))
    full = [device for device, size in needs.items() if size > plan.device_memory_gb * 2**30]
    if full:
        most = max(full, key=needs.__getitem__)
        names = " and ".join(name for name, role in plan.roles().items() if most in role.devices)
        how = "even as they take turns" if members_on_gpus(plan) else "all of which stay in memory"
        tell.warn(
            f"devices {short_devices(full)} have {plan.device_memory_gb:g} GiB each and need about"
            f" {readable_bytes(needs[most])} for {names}, {how}; give roles devices of their own,"
            " split them further, or lower gpu_memory_utilization or the tokens of a micro-batch"
        )
