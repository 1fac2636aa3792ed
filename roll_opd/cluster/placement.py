"""Map the device numbers of `device_mapping` to bundles of Ray placement groups.

Device d is device d % devices_per_node of node d // devices_per_node. Node 0 is the driver's host. The other nodes are
ordered by rank. In a Ray cluster that the run has joined, they are ordered by address. Roles that use the same device
number share the device.

On a machine without GPUs, a device is a slot. Unless the run is deterministic, a role then uses all cores of its node,
because roles take turns for most of a step.
"""

import ipaddress
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from roll_opd.base.user_modules import module_variables
from roll_opd.cluster.lost_processes import ClusterError, Losses
from roll_opd.cluster.ray_environment import torch_variables
from roll_opd.cluster.ray_runtime import SLOT
from roll_opd.cluster.startup_progress import StartupProgress

SHARE = 1 / 64  # fraction of a device that one worker requests from Ray; the plan limits the workers per device
PLACEMENT_TIMEOUT_S = 120


@dataclass(frozen=True)
class Device:
    """A device: its placement-group bundle, node and address."""

    group: PlacementGroup
    bundle: int
    node: int
    cores: int  # CPU cores of the node
    gpu: str | None  # id for CUDA_VISIBLE_DEVICES on its node
    address: str = ""  # address of the node


class Placement:
    """The reserved devices of a run."""

    def __init__(
        self,
        num_nodes: int,
        devices_per_node: int,
        starting: StartupProgress | None = None,
        *,
        deterministic: bool = True,
        addresses: Sequence[str] = (),
        losses: Losses | None = None,
    ) -> None:
        """Reserve the devices: GPUs if the cluster has GPUs, otherwise slots.

        Raises ClusterError if the cluster has too few devices.

        Args:
            addresses: the addresses of the run's hosts, in order of rank. Empty if the run has not started Ray on them.
            losses: limit and record of the processes that are lost on these devices.
            deterministic: every process gets the CPU threads of one device. If false, the processes of a role share all
                cores of a node without GPUs. The number of threads, and so the order of sums, then depends on the
                layout.
        """
        self.starting, self.losses = starting or StartupProgress(), losses or Losses()
        self._per_node, self._deterministic = devices_per_node, deterministic
        self.on_gpu = on_gpu = ray.cluster_resources().get("GPU", 0) > 0
        self._resource = "GPU" if on_gpu else SLOT
        # if the cluster is busy, wait; if it is too small, fail
        nodes = [node for node in ray.nodes() if node["Alive"]]
        offered = [(node["Resources"].get(self._resource, 0), node["NodeManagerAddress"]) for node in nodes]
        room = sum(int(count // devices_per_node) for count, _ in offered)
        if room < num_nodes:
            raise ClusterError(
                f"num_nodes {num_nodes} x num_gpus_per_node {devices_per_node} do not fit the cluster: its nodes"
                f" have {', '.join(f'{count:g} ({address})' for count, address in offered)} {self._resource};"
                " lower these numbers, or start Ray on more nodes"
            )
        groups = [
            placement_group([{self._resource: 1, "CPU": 1}] * devices_per_node, strategy="STRICT_PACK")
            for _ in range(num_nodes)
        ]
        for group in groups:
            with self.starting.waiting_for(f"{devices_per_node} free {self._resource} on a node"):
                is_placed = group.wait(PLACEMENT_TIMEOUT_S)
            if not is_placed:
                raise ClusterError(
                    f"the cluster has no node with {devices_per_node} free {self._resource}: it offers "
                    f"{ray.cluster_resources()}. Lower num_gpus_per_node / num_nodes, or free the devices"
                )
        by_id = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
        of_groups = [(by_id.get(node_of(group), ""), group) for group in groups]
        first = ray.util.get_node_ip_address()
        self._devices = [
            self._probe(group, node, address, bundle, on_gpu)
            for node, (address, group) in enumerate(
                sorted(of_groups, key=lambda each: node_order(each[0], first, addresses))
            )
            for bundle in range(devices_per_node)
        ]

    def where(self, device: int) -> str:
        """Return a device's number as text; with several hosts, also the address of the device's host."""
        several = len({each.address for each in self._devices}) > 1
        return f"device {device}" + (f" of {self._devices[device].address}" if several else "")

    def hosts(self) -> dict[str, list[int]]:
        """Return a map from the address of each host to the numbers of the devices on that host."""
        found: dict[str, list[int]] = {}
        for number, device in enumerate(self._devices):
            found.setdefault(device.address, []).append(number)
        return found

    def options(self, devices: tuple[int, ...], role: tuple[int, ...], env: dict[str, str]) -> dict:
        """Return the Ray options of a process.

        Args:
            devices: numbers of the devices that the process sees. The process is placed on the first of them.
            role: numbers of all devices of the process's role.
            env: additional environment variables.
        """
        home = self._devices[devices[0]]
        if len({self._devices[number].node for number in devices}) > 1:
            raise ClusterError(
                f"devices {', '.join(map(str, devices))} of one process are not on one node; change the device_mapping"
            )
        variables = {"OMP_NUM_THREADS": str(self._threads(home, role)), **torch_variables()}
        variables |= module_variables() | env
        gpus = [self._devices[number].gpu for number in devices]
        if home.gpu is not None:
            variables |= {
                "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus),
                "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
                "LOCAL_RANK": "0",  # among the visible devices
            }
        claim = {"num_gpus": SHARE} if self._resource == "GPU" else {"resources": {SLOT: SHARE}}
        return {
            "num_cpus": 0,
            **claim,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                home.group, placement_group_bundle_index=home.bundle
            ),
            "runtime_env": {"env_vars": variables},
        }

    def _threads(self, home: Device, role: tuple[int, ...]) -> int:
        """Return the number of CPU threads for a process.

        Args:
            home: the device on which the process is placed.
            role: numbers of all devices of the process's role.
        """
        shared_by = self._per_node
        if home.gpu is None and not self._deterministic:
            shared_by = sum(self._devices[number].node == home.node for number in role)
        return max(1, home.cores // shared_by)

    def _probe(self, group: PlacementGroup, node: int, address: str, bundle: int, on_gpu: bool) -> Device:
        if not (on_gpu or os.environ.get("RAY_ADDRESS")) and address == ray.util.get_node_ip_address():  # this machine
            return Device(group, bundle, node, len(os.sched_getaffinity(0)), None, address)
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
        claim = {"num_gpus": SHARE} if on_gpu else {"resources": {SLOT: SHARE}}
        seen = _look.options(num_cpus=0, scheduling_strategy=strategy, **claim).remote()
        timeout = None if math.isinf(self.starting.seconds) else self.starting.seconds
        with self.starting.waiting_for("the first Ray process"):
            try:
                cores, gpus = ray.get(seen, timeout=timeout)
            except ray.exceptions.GetTimeoutError:
                raise ClusterError(f"the first Ray process {self.starting.timeout_message()}") from None
        return Device(group, bundle, node, cores, gpus[0] if on_gpu else None, address)


def node_of(group: PlacementGroup) -> str:
    """Return the id of the node on which a placement group is placed."""
    return next(iter(placement_group_table(group)["bundles_to_node_id"].values()))


def node_order(address: str, first: str, ranks: Sequence[str]) -> tuple[int, int, str]:
    """Return the sort key of a node.

    The nodes in `ranks` come first, in the order of `ranks`. They are followed by the driver's host `first`. All other
    nodes follow in the order of their IP addresses.
    """
    if address in ranks:
        return ranks.index(address), 0, ""
    try:
        return len(ranks) + (address != first), int(ipaddress.ip_address(address)), ""
    except ValueError:
        return len(ranks) + (address != first), 0, address


@ray.remote
def _look() -> tuple[int, list[str]]:
    return len(os.sched_getaffinity(0)), [str(gpu) for gpu in ray.get_gpu_ids()]
