"""What torchrun and srun put into the environment, as their manuals state it, and what must not be taken for it."""

import socket

import pytest

from meshwright.errors import UserError
from meshwright.launch.environment import (
    RankInfo,
    expand_counts,
    expand_first_host,
    local_environment,
    local_rank_info,
    rank_environment,
    rank_from_environment,
)

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "login1",
    "MASTER_PORT": "29400",
}
SRUN = {
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "12",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "8,4",
    "SLURM_STEP_NODELIST": "frontier[00123-00124]",
    "SLURM_JOB_NODELIST": "frontier[00122-00125]",
    "SLURMD_NODENAME": "frontier00124",
}


def without(env: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in env.items() if name not in names}


def test_torchrun() -> None:
    assert rank_from_environment(TORCHRUN) == RankInfo(5, 8, 1, 4, 1, socket.gethostname(), "login1", 29400)


def test_srun() -> None:
    info = rank_from_environment(SRUN)
    assert info is not None
    assert info == RankInfo(9, 12, 1, 4, 1, "frontier00124", "frontier00123", info.master_port)
    assert 1024 < info.master_port < 32768  # below Linux's ephemeral ports


def test_srun_port_is_the_jobs_own_unless_named() -> None:
    def port(**changes: str) -> int:
        info = rank_from_environment(SRUN | changes)
        assert info is not None
        return info.master_port

    assert port(SLURM_PROCID="0", SLURM_NODEID="0", SLURM_LOCALID="0") == port()  # equal on every rank
    assert len({port(SLURM_JOB_ID=str(job)) for job in range(100, 200)}) == 100
    assert port(SLURM_STEP_ID="3") != port()
    assert port(MASTER_PORT="29501") == 29501


def test_srun_address_can_be_named() -> None:
    info = rank_from_environment(SRUN | {"MASTER_ADDR": "10.0.0.1"})
    assert info is not None
    assert info.master_addr == "10.0.0.1"


def test_torchrun_inside_srun_wins() -> None:
    info = rank_from_environment(SRUN | TORCHRUN)
    assert info is not None
    assert info.world_size == 8


@pytest.mark.parametrize(
    "env",
    [
        {},
        {"WORLD_SIZE": "8", "MASTER_ADDR": "node1"},  # some clouds set these in every container
        # salloc: an allocation, no step
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16", "SLURM_JOB_NODELIST": "n[1-2]"},
        {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1"},
        # sbatch: the script runs as task 0 of no step
        {
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
            "SLURM_NTASKS": "16",
        },
        # srun --pty bash
        SRUN | {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "1"},
        without(SRUN, "SLURM_STEP_NUM_TASKS") | {"SLURM_NTASKS": "1"},
        without(SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        # the interactive step of salloc and the batch step, as new (unsigned) and old (negative) Slurm number them
        SRUN | {"SLURM_STEP_ID": "4294967290"},
        SRUN | {"SLURM_STEP_ID": "-5"},
    ],
)
def test_what_is_no_rank(env: dict[str, str]) -> None:
    assert rank_from_environment(env) is None


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        (without(TORCHRUN, "WORLD_SIZE", "MASTER_PORT"), "RANK is set but WORLD_SIZE, MASTER_PORT not"),
        (TORCHRUN | {"RANK": "five"}, "RANK is 'five' in the environment; a whole number is needed"),
        (TORCHRUN | {"RANK": "-1"}, "RANK is -1 in the environment; it cannot be less than 0"),
        (TORCHRUN | {"RANK": "8"}, "rank 8 does not exist in a world of 8 ranks"),
        (TORCHRUN | {"LOCAL_RANK": "4"}, "local rank 4 does not exist among 4 ranks on a host"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "9"}, "9 ranks on this host are more than the world's 8"),
        (
            TORCHRUN | {"MASTER_PORT": "70000"},
            "MASTER_PORT is 70000 in the environment; a port lies in 1..65535",
        ),
        (SRUN | {"SLURM_STEP_NODELIST": "node[1-"}, "'node[1-', which is no list of hosts"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "8(x"}, "SLURM_STEP_TASKS_PER_NODE is '8(x', which is no list"),
        (without(SRUN, "SLURM_LOCALID"), "SLURM_LOCALID not: start the ranks with srun"),
        (without(SRUN, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"), "SLURM_STEP_NODELIST is not set"),
        (without(SRUN, "SLURM_JOB_ID"), "SLURM_JOB_ID is not set"),
        (SRUN | {"SLURM_PROCID": "x"}, "SLURM_PROCID is 'x' in the environment"),
    ],
)
def test_bad_values_are_told(env: dict[str, str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        rank_from_environment(env)
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("node1", "node1"),
        ("node007,node009", "node007"),
        ("node[007-012,020],login1", "node007"),
        ("node[3,5-9]", "node3"),
        ("rack[2-3]-gpu[01-08]", "rack2-gpu01"),
        ("x1000c[0-7]s0.cluster.org", "x1000c0s0.cluster.org"),
    ],
)
def test_first_host_of_a_node_list(nodelist: str, first: str) -> None:
    assert expand_first_host(nodelist) == first


def test_tasks_per_node() -> None:
    assert expand_counts("8(x3),4,2(x1)") == [8, 8, 8, 4, 2]


def test_group_rank_follows_from_the_rank_where_a_wrapper_left_it_out() -> None:
    info = rank_from_environment(without(TORCHRUN, "GROUP_RANK"))
    assert info is not None
    assert info.node_rank == 1


def test_environment_of_a_rank_reads_back() -> None:
    info = local_rank_info(2, 4, 12345)
    assert rank_from_environment(rank_environment(info)) == info
    assert local_environment(info)["GLOO_SOCKET_IFNAME"] == "lo"
