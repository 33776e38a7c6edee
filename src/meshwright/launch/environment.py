"""Who this process is among the ranks of a run, read from what torchrun or srun put into the environment.

No torch here: the command line asks before it decides whether to start ranks itself.
"""

import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from meshwright.errors import UserError

LOOPBACK = "127.0.0.1"

# Slurm gives its own steps (interactive shell, batch script, extern) the numbers from here up: SLURM_BATCH_SCRIPT
# and its neighbours in slurm.h. They are shells in which a user types, never the ranks of a run.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0

# Below Linux's ephemeral range (32768 and up), so that no outgoing connection can hold the port.
_FIRST_PORT, _PORTS = 12000, 18000


@dataclass(frozen=True)
class RankInfo:
    """One rank's place in the run.

    `rank` of `world_size` counts over the whole run, `local_rank` of `local_world_size` over the ranks on `host`,
    `node_rank` over the hosts. The store through which ranks find each other listens on
    `master_addr`:`master_port`.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    host: str
    master_addr: str
    master_port: int


def rank_from_environment(env: Mapping[str, str]) -> RankInfo | None:
    """Read this process's rank from `env`, or return None where no launcher started it.

    torchrun's variables win over Slurm's, so a torchrun inside an srun works. A Slurm step of one task (an
    interactive shell, say) is no launcher: the run is then started from here, and None is returned.
    Raises UserError naming the variable that is missing or wrong.
    """
    if "RANK" in env:
        return _checked(_from_torchrun(env))
    if _is_slurm_step(env):
        return _checked(_from_slurm(env))
    return None


def rank_environment(info: RankInfo) -> dict[str, str]:
    """Build the variables that torchrun would have set for this rank."""
    return {
        "RANK": str(info.rank),
        "WORLD_SIZE": str(info.world_size),
        "LOCAL_RANK": str(info.local_rank),
        "LOCAL_WORLD_SIZE": str(info.local_world_size),
        "GROUP_RANK": str(info.node_rank),
        "MASTER_ADDR": info.master_addr,
        "MASTER_PORT": str(info.master_port),
    }


def local_rank_info(rank: int, world_size: int, master_port: int) -> RankInfo:
    """Build the place of one rank of a run that lives on this host alone."""
    return RankInfo(rank, world_size, rank, world_size, 0, socket.gethostname(), LOOPBACK, master_port)


def local_environment(info: RankInfo) -> dict[str, str]:
    """Build the variables of a rank of a local run: torchrun's, and gloo kept off every outside interface."""
    # Without this gloo binds to whatever the host name resolves to: reachable from outside, and on a laptop
    # without a network or with a wrong /etc/hosts not reachable at all.
    return {**rank_environment(info), "GLOO_SOCKET_IFNAME": "lo"}


def expand_first_host(nodelist: str) -> str:
    """Name the first host of a Slurm node list: `node[007-012,020],login1` gives `node007`.

    Raises UserError where the text is no node list.
    """
    # The first element ends at the first comma outside brackets; each bracket in it gives its first number.
    first, depth = "", 0
    for letter in nodelist.strip():
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            break
        first += letter
    host = re.sub(r"\[(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*\]", r"\1", first)
    if depth != 0 or not re.fullmatch(r"[A-Za-z0-9._-]+", host):
        raise UserError(
            f"SLURM_STEP_NODELIST or SLURM_JOB_NODELIST is {nodelist!r}, which is no list of hosts like node[001-004]"
        )
    return host


def expand_counts(counts: str) -> list[int]:
    """Expand Slurm's tasks per node: `4(x2),3` gives [4, 4, 3]. Raises UserError where the text is no such list."""
    expanded: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE is {counts!r}, which is no list of counts like 8(x2),4"
            )
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded


def _from_torchrun(env: Mapping[str, str]) -> RankInfo:
    needed = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in needed if not env.get(name)]
    if missing:
        raise UserError(
            f"RANK is set but {', '.join(missing)} not: start the ranks with torchrun or srun, "
            "or unset RANK to let meshwright start them on this host"
        )
    rank, local_rank = _int(env, "RANK"), _int(env, "LOCAL_RANK")
    local_world_size = _int(env, "LOCAL_WORLD_SIZE")
    # Wrappers round srun or mpirun often leave GROUP_RANK out; ranks are then dealt out node by node.
    node_rank = _int(env, "GROUP_RANK") if env.get("GROUP_RANK") else rank // max(1, local_world_size)
    return RankInfo(
        rank=rank,
        world_size=_int(env, "WORLD_SIZE"),
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        host=socket.gethostname(),
        master_addr=env["MASTER_ADDR"],
        master_port=_int(env, "MASTER_PORT"),
    )


def _is_slurm_step(env: Mapping[str, str]) -> bool:
    if not env.get("SLURM_STEP_ID") or not env.get("SLURM_PROCID"):
        return False
    # An older Slurm writes the special steps' numbers as negative ones.
    return 0 <= _int(env, "SLURM_STEP_ID", least=-10) < _FIRST_SPECIAL_STEP and _slurm_tasks(env) > 1


def _slurm_tasks(env: Mapping[str, str]) -> int:
    # The step's own count first: SLURM_NTASKS may still be the allocation's when a shell inside it is asked.
    for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"):
        if env.get(name):
            return _int(env, name)
    return 1


def _from_slurm(env: Mapping[str, str]) -> RankInfo:
    if not env.get("SLURM_LOCALID"):
        raise UserError("SLURM_STEP_ID is set but SLURM_LOCALID not: start the ranks with srun")
    node_rank = _int(env, "SLURM_NODEID") if env.get("SLURM_NODEID") else 0
    return RankInfo(
        rank=_int(env, "SLURM_PROCID"),
        world_size=_slurm_tasks(env),
        local_rank=_int(env, "SLURM_LOCALID"),
        local_world_size=_slurm_tasks_on_node(env, node_rank),
        node_rank=node_rank,
        host=env.get("SLURMD_NODENAME") or socket.gethostname(),
        master_addr=env.get("MASTER_ADDR") or _slurm_first_host(env),
        master_port=_int(env, "MASTER_PORT") if env.get("MASTER_PORT") else _slurm_port(env),
    )


def _slurm_tasks_on_node(env: Mapping[str, str], node_rank: int) -> int:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if env.get(name):
            counts = expand_counts(env[name])
            if node_rank < len(counts):
                return counts[node_rank]
    if env.get("SLURM_NTASKS_PER_NODE"):
        return _int(env, "SLURM_NTASKS_PER_NODE")
    if (env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES") or "1") == "1":
        return _slurm_tasks(env)
    raise UserError("srun left SLURM_STEP_TASKS_PER_NODE unset: give --ntasks-per-node")


def _slurm_first_host(env: Mapping[str, str]) -> str:
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
    if not nodelist:
        raise UserError("SLURM_STEP_NODELIST is not set: start the ranks with srun, or set MASTER_ADDR")
    return expand_first_host(nodelist)


def _slurm_port(env: Mapping[str, str]) -> int:
    """Derive a port from job and step, so that every rank finds the same and two jobs on a node rarely do."""
    if not (env.get("SLURM_JOB_ID") or env.get("SLURM_JOBID")):
        raise UserError("SLURM_JOB_ID is not set: start the ranks with srun, or set MASTER_PORT")
    job = _int(env, "SLURM_JOB_ID" if env.get("SLURM_JOB_ID") else "SLURM_JOBID")
    return _FIRST_PORT + (job * 31 + _int(env, "SLURM_STEP_ID")) % _PORTS


def _int(env: Mapping[str, str], name: str, least: int = 0) -> int:
    try:
        value = int(env[name])
    except ValueError:
        raise UserError(f"{name} is {env[name]!r} in the environment; a whole number is needed") from None
    if value < least:
        raise UserError(f"{name} is {value} in the environment; it cannot be less than {least}")
    return value


def _checked(info: RankInfo) -> RankInfo:
    if info.rank >= info.world_size:
        raise UserError(
            f"rank {info.rank} does not exist in a world of {info.world_size} ranks: see RANK/SLURM_PROCID"
        )
    if info.local_rank >= info.local_world_size:
        raise UserError(
            f"local rank {info.local_rank} does not exist among {info.local_world_size} ranks on a host: "
            "see LOCAL_RANK and LOCAL_WORLD_SIZE, or SLURM_LOCALID and SLURM_STEP_TASKS_PER_NODE"
        )
    if info.local_world_size > info.world_size:
        raise UserError(
            f"{info.local_world_size} ranks on this host are more than the world's {info.world_size}: "
            "see LOCAL_WORLD_SIZE and WORLD_SIZE"
        )
    if not 1 <= info.master_port <= 65535:
        raise UserError(f"MASTER_PORT is {info.master_port} in the environment; a port lies in 1..65535")
    return info
