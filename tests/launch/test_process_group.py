"""The process group under a real torchrun, and the choice of a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshwright.errors import UserError
from meshwright.launch.environment import RankInfo
from meshwright.launch.process_group import init_process_group

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from meshwright.launch.environment import rank_from_environment
from meshwright.launch.process_group import init_process_group, shutdown_process_group
from meshwright.launch.watchdog import Watchdog

info = rank_from_environment(os.environ)
with Watchdog(60.0, rank=info.rank) as control:
    device = init_process_group(info, "cpu", 60.0, control.listen_fd)
    control.beat(0)
    total = torch.tensor([info.rank + 1.0])
    dist.all_reduce(total)
    found = [info.rank, info.world_size, total.item(), str(device)]
    Path(sys.argv[1], f"{info.rank}.json").write_text(json.dumps(found))
    shutdown_process_group()
shutdown_process_group()  # without a group nothing happens
"""


def test_ranks_under_torchrun_meet(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    # Port 0: torchrun's agent chooses a free one, listens on it, and names it to the ranks.
    command = [*torchrun, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    done = subprocess.run(
        [*command, str(script), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [
        [0, 2, 3.0, "cpu"],
        [1, 2, 3.0, "cpu"],
    ]


INFO = RankInfo(3, 4, 3, 4, 0, "node1", "127.0.0.1", 29500)


def test_missing_gpu_is_told_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        UserError, match="rank 3 needs GPU 3 of host node1, which shows 2: start at most 2 ranks"
    ):
        init_process_group(INFO, "cuda", 1.0)


def test_one_visible_gpu_serves_only_a_task_that_srun_bound_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def set_device(index: int) -> None:
        chosen.append(index)
        raise KeyboardInterrupt  # go no further: there is no GPU here

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    monkeypatch.delenv("SLURM_LOCALID", raising=False)
    with pytest.raises(UserError, match="rank 3 needs GPU 3"):
        init_process_group(INFO, "cuda", 1.0)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    with pytest.raises(KeyboardInterrupt):
        init_process_group(INFO, "cuda", 1.0)
    assert chosen == [0]


def test_unknown_device() -> None:
    with pytest.raises(UserError, match="device 'tpu' is not known: cpu or cuda"):
        init_process_group(INFO, "tpu", 1.0)
