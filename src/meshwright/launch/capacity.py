"""Whether this host can hold the ranks of a local run, asked before any is started."""

import os
from pathlib import Path

import psutil

from meshwright.errors import UserError

MOST_RANKS_PER_CORE = 64
_GIB = 2**30


def cores_available() -> int:
    """Count the cores this process may run on (an allocation or a container may hold fewer than the host has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_available_bytes() -> int:
    """Measure how much memory new processes can take: what the host has free, within the limit of our cgroup."""
    available = int(psutil.virtual_memory().available)
    left = _cgroup_left_bytes(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))
    return available if left is None else min(available, left)


def check_host_capacity(world_size: int, bytes_per_rank: int) -> None:
    """Refuse more ranks than this host can hold.

    `bytes_per_rank` is the estimated peak of one rank. Raises UserError with the largest number that would do.
    """
    cores = cores_available()
    if world_size > MOST_RANKS_PER_CORE * cores:
        raise UserError(
            f"{world_size} ranks are too many for the {cores} cores of this host: "
            f"at most {MOST_RANKS_PER_CORE * cores} can be started here"
        )
    available = memory_available_bytes()
    if world_size * bytes_per_rank > available:
        most = available // bytes_per_rank
        remedy = f"at most {most} such ranks fit" if most else "not one such rank fits"
        raise UserError(
            f"{world_size} ranks need about {world_size * bytes_per_rank / _GIB:.1f} GiB of memory "
            f"({bytes_per_rank / _GIB:.2f} GiB each) and this host has {available / _GIB:.1f} GiB available: {remedy}; "
            "use fewer ranks, a smaller model or micro-batch, or a layout that shards more"
        )


def _cgroup_left_bytes(root: Path, membership: Path) -> int | None:
    """Return what the tightest cgroup (v2) above us still allows, or None where nothing limits us."""
    try:
        group = next(line[3:] for line in membership.read_text().splitlines() if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    limits: list[int] = []
    directory = root / group.strip("/")
    while directory == root or root in directory.parents:
        try:
            limit = (directory / "memory.max").read_text().strip()
            used = int((directory / "memory.current").read_text())
            statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            limit, used, statistics = "max", 0, {}
        if limit.isdigit():
            # Files read long ago count as used, but the kernel drops them when memory is asked for.
            limits.append(max(0, int(limit) - used + int(statistics.get("inactive_file", 0))))
        directory = directory.parent
    return min(limits, default=None)
