"""The order of hosts, and CPU threads of a role's processes."""

from typing import Any

import pytest

from roll_opd.cluster.lost_processes import ClusterError
from roll_opd.cluster.placement import Device, Placement, node_order

NOBODY: Any = None  # no placement group is asked


def placement(gpus: bool, deterministic: bool) -> Placement:
    """Two nodes of 8 cores, with 4 devices each."""
    made = object.__new__(Placement)
    made._per_node, made._deterministic = 4, deterministic
    made._devices = [Device(NOBODY, n % 4, n // 4, 8, str(n % 4) if gpus else None) for n in range(8)]
    return made


@pytest.mark.parametrize(
    ("role", "deterministic", "gpus", "threads"),
    [
        ((0,), False, False, [8]),  # alone on its node
        ((0, 1), False, False, [4, 4]),
        ((0, 1, 2, 3), False, False, [2] * 4),
        ((3, 4, 5), False, False, [8, 4, 4]),  # one here, two there
        ((0,), True, False, [2]),  # its device's share, whatever the role
        ((0, 1), True, False, [2, 2]),
        ((0,), False, True, [2]),  # the cores are not what computes
    ],
)
def test_a_role_has_the_cores_of_its_nodes(
    role: tuple[int, ...], deterministic: bool, gpus: bool, threads: list[int]
) -> None:
    made = placement(gpus, deterministic)
    assert [made._threads(made._devices[number], role) for number in role] == threads


def test_more_processes_than_cores_have_a_thread_each() -> None:
    made = placement(gpus=False, deterministic=False)
    made._devices = [Device(NOBODY, n, 0, 2, None) for n in range(4)]
    assert made._threads(made._devices[0], (0, 1, 2, 3)) == 1


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [
        ((), ["10.0.0.20", "10.0.0.3", "10.0.0.100"]),  # the driver's first, then as numbers
        (("10.0.0.20", "10.0.0.100", "10.0.0.3"), ["10.0.0.20", "10.0.0.100", "10.0.0.3"]),
    ],
)
def test_hosts_are_in_a_stated_order(ranks: tuple[str, ...], wanted: list[str]) -> None:
    addresses = ["10.0.0.100", "10.0.0.3", "10.0.0.20"]
    assert sorted(addresses, key=lambda each: node_order(each, "10.0.0.20", ranks)) == wanted


def test_a_process_has_devices_of_one_host() -> None:
    made = placement(gpus=True, deterministic=False)
    with pytest.raises(ClusterError, match="devices 3, 4 of one process are not on one node"):
        made.options((3, 4), (3, 4), {})


def test_a_device_is_named_with_its_host() -> None:
    made = placement(gpus=False, deterministic=False)
    assert made.where(5) == "device 5"
    made._devices = [Device(NOBODY, 0, n, 8, None, f"10.0.0.{n + 1}") for n in range(2)]
    assert made.where(1) == "device 1 of 10.0.0.2"
    assert made.hosts() == {"10.0.0.1": [0], "10.0.0.2": [1]}
