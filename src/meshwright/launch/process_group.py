"""The default process group of a rank: where ranks meet, over which backend, on which device. Imports torch."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from meshwright.errors import UserError
from meshwright.launch.environment import RankInfo


def init_process_group(
    info: RankInfo, device_type: str, timeout_s: float, listen_fd: int | None = None
) -> torch.device:
    """Join the ranks of the run in the default process group and return this rank's device.

    `device_type` is "cpu" (gloo) or "cuda" (gloo for CPU tensors, NCCL for the others; on a ROCm build RCCL
    answers to the same name). `timeout_s` bounds both the meeting and every later collective. `listen_fd` is a
    listening socket, which rank 0 of a local run takes over for its store; elsewhere it is None, and rank 0 listens
    on `info.master_port`. Raises UserError where this host has no device for the rank.
    """
    timeout = timedelta(seconds=timeout_s)
    device = _device(info, device_type)
    store = _store(info, timeout, listen_fd)
    dist.init_process_group(
        backend="gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        store=store,
        rank=info.rank,
        world_size=info.world_size,
        timeout=timeout,
        device_id=None if device_type == "cpu" else device,
    )
    return device


def shutdown_process_group() -> None:
    """Leave the default process group once every rank is here; without a group, do nothing.

    Rank 0 holds the store: left alone, a quick rank 0 would take it away from ranks that still set up a group.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def _store(info: RankInfo, timeout: timedelta, listen_fd: int | None) -> Store:
    if listen_fd is not None:
        return dist.TCPStore(  # type: ignore[attr-defined]
            info.master_addr,
            info.master_port,
            info.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listen_fd,
        )
    # torch's own rendezvous knows that torchrun's agent may already hold the store on this port.
    address = f"[{info.master_addr}]" if ":" in info.master_addr else info.master_addr
    url = f"tcp://{address}:{info.master_port}"
    store: Store = next(rendezvous(url, info.rank, info.world_size, timeout=timeout))[0]
    return store


def _device(info: RankInfo, device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type != "cuda":
        raise UserError(f"device {device_type!r} is not known: cpu or cuda (NVIDIA and AMD) would be right")
    count = torch.cuda.device_count()
    index = info.local_rank
    # srun --gpus-per-task=1 shows each task its own GPU alone, always under the number 0.
    if count == 1 and index > 0 and os.environ.get("SLURM_LOCALID") == str(index):
        index = 0
    if index >= count:
        raise UserError(
            f"rank {info.rank} needs GPU {index} of host {info.host}, which shows {count}: "
            f"start at most {count} ranks there, or train on the cpu"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
