"""The rank and the address of a host, from the environment variables of launchers."""

import pytest

from roll_opd.cluster.multihost.host_facts import LaunchedHost, LaunchError, first_node, forget, launched

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "1",
    "ROLE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_NTASKS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_JOB_NODELIST": "gpu[007-009]",
}
MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({}, None),
        (TORCHRUN, LaunchedHost(1, 3, "10.0.0.1", 29501)),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None),
        ({**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "RAY_ADDRESS": "10.0.0.9:6379"}, None),
        (SRUN, LaunchedHost(1, 3, "gpu007", 29501)),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "400"}, LaunchedHost(1, 3, "10.0.0.1", 401)),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, None),  # a step of one task in a job of three
        ({**SRUN, **TORCHRUN, "RANK": "2"}, LaunchedHost(2, 3, "10.0.0.1", 29501)),  # torchrun, started by srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_PTY_PORT": "4000"}, None),  # in a shell of srun --pty
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "ENVIRONMENT": "BATCH"}, None),  # in sbatch's script, without srun
        ({"SLURM_NTASKS": "8"}, None),  # in salloc's shell
        (MPIRUN, LaunchedHost(1, 3, "10.0.0.1", 29501)),
    ],
)
def test_rank_and_size_are_the_launchers(environ: dict[str, str], found: LaunchedHost | None) -> None:
    assert launched(environ) == found


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, "2 processes were launched on a host.*--nproc_per_node 1"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "1,2(x1)"}, "--ntasks-per-node=1"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, "--map-by ppr:1:node"),
        ({**TORCHRUN, "RAY_ADDRESS": "auto"}, "RAY_ADDRESS names a Ray cluster, and 3 hosts were launched"),
        ({**MPIRUN, "MASTER_ADDR": ""}, "MASTER_ADDR is not set"),
        ({**TORCHRUN, "RANK": "one"}, "RANK is 'one'"),
    ],
)
def test_an_unusable_environment_is_an_error(environ: dict[str, str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        launched(environ)


def test_the_first_node_of_slurms_lists() -> None:
    lists = {"n[003-006,9],m1": "n003", "node1,node2": "node1", "a-1": "a-1", "c[1-2]-ib,x": "c1-ib", "": ""}
    assert {text: first_node(text) for text in lists} == lists


def test_the_processes_of_a_run_do_not_see_torchrun() -> None:
    environ = {**TORCHRUN, "PATH": "/bin"}
    forget(environ)
    assert environ == {"PATH": "/bin"}
