"""What ranks do in the launch tests. At the top of a module, so that it can be sent to a clean process."""

import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from meshwright.errors import RunFailed, UserError
from meshwright.launch.control import RankControl
from meshwright.launch.environment import RankInfo
from meshwright.launch.local import run_local
from tests.distributed.zygote import send


def launch(
    conn: Connection, target: str, world_size: int, log_dir: Path, options: dict[str, Any]
) -> dict[str, Any]:
    """Run a target of this module under `run_local` and tell how it ended; messages go to `conn` as they come."""
    start_s = time.monotonic()
    notices: list[str] = []
    ending = "finished"
    try:
        run_local(
            globals()[target],
            world_size,
            log_dir,
            on_message=lambda rank, message: send(conn, ("message", (rank, message))),
            on_notice=notices.append,
            **{"hang_timeout_s": 60.0, **options},
        )
    except (UserError, RunFailed, KeyboardInterrupt) as error:
        ending = f"{type(error).__name__}: {error}"
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "ending": ending,
        "notices": notices,
        "start_s": start_s,
        "elapsed_s": time.monotonic() - start_s,
        "children": children,  # zombies are listed too
        "open_fds": sorted(os.listdir("/proc/self/fd")),
    }


def join(info: RankInfo, control: RankControl) -> None:
    from meshwright.launch.process_group import init_process_group

    init_process_group(info, "cpu", timeout_s=60.0, listen_fd=control.listen_fd)


def leave() -> None:
    from meshwright.launch.process_group import shutdown_process_group

    shutdown_process_group()


def wait_in_collective() -> None:
    import torch.distributed as dist

    dist.barrier()


def sum_up(info: RankInfo, control: RankControl) -> None:
    import torch
    import torch.distributed as dist

    join(info, control)
    total = torch.tensor([float(info.rank)])
    dist.all_reduce(total)
    print(f"rank {info.rank} got {total.item()}")
    os.system("echo from a child of the rank")
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
    )
    control.send(
        {"kind": "summary", "env": [os.environ[name] for name in names], "threads": torch.get_num_threads()}
    )
    control.say(f"rank {info.rank} is done")
    leave()


def join_only(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    control.send({"kind": "ready", "at_s": time.monotonic()})
    leave()


def nothing(info: RankInfo, control: RankControl) -> None:
    pass


def user_error_on_1(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    if info.rank == 1:
        raise UserError("optimizer.lr is -1; a number above 0 would be right")
    wait_in_collective()


def exception_on_2(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    if info.rank == 2:
        raise ValueError("layer 7 has no weight\nand a second line")
    wait_in_collective()


def run_failed_on_1(info: RankInfo, control: RankControl) -> None:
    if info.rank == 1:
        raise RunFailed("the loss at step 5 is not a number")
    time.sleep(600)


def slow_culprit(info: RankInfo, control: RankControl) -> None:
    """Rank 0 first complains of its connection; the rank at fault dies half a second later."""
    if info.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:1234")
    time.sleep(0.5)
    if info.rank == 1:
        raise KeyError("bias")
    time.sleep(600)


def only_consequences(info: RankInfo, control: RankControl) -> None:
    if info.rank == 0:
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1000ms for recv")
    time.sleep(600)


def killed_1(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    if info.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_in_collective()


def crash_1(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    if info.rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    wait_in_collective()


def exit_7_on_0(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    if info.rank == 0:
        os._exit(7)
    wait_in_collective()


def sys_exit_3_on_0(info: RankInfo, control: RankControl) -> None:
    if info.rank == 0:
        raise SystemExit(3)


def sys_exit_0(info: RankInfo, control: RankControl) -> None:
    raise SystemExit(0)


def silent_exit_0_on_1(info: RankInfo, control: RankControl) -> None:
    if info.rank == 1:
        os._exit(0)
    time.sleep(600)


def stubborn_others(info: RankInfo, control: RankControl) -> None:
    """Rank 0 fails; rank 1 ignores SIGTERM and has started a process of its own, in which it would live on."""
    if info.rank == 0:
        time.sleep(0.5)
        raise ValueError("enough")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    grandchild = os.fork()
    if grandchild == 0:
        time.sleep(600)
        os._exit(0)
    control.send({"kind": "pids", "pids": [os.getpid(), grandchild]})
    time.sleep(600)


def hang_on_1(info: RankInfo, control: RankControl) -> None:
    join(info, control)
    for step in range(4):
        control.beat(step)
        if info.rank == 1 and step == 3:
            lost_in_thought()
        wait_in_collective()


def lost_in_thought() -> None:
    time.sleep(600)


def hang_before_first_step(info: RankInfo, control: RankControl) -> None:
    lost_in_thought()


def stopped_1(info: RankInfo, control: RankControl) -> None:
    control.beat(0)
    if info.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    lost_in_thought()


def train_until_stopped(info: RankInfo, control: RankControl) -> None:
    """Step until asked to stop; the ranks agree on the step by a reduction, as a trainer does."""
    import torch
    import torch.distributed as dist

    join(info, control)
    for step in range(10_000):
        control.beat(step)
        if step == 2:
            control.send({"kind": "running", "pid": os.getpid()})
        time.sleep(0.01)
        stop = torch.tensor([int(control.stop_requested)])
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            control.send({"kind": "stopped", "step": step})
            break
    leave()


def deaf_to_stop(info: RankInfo, control: RankControl) -> None:
    control.send({"kind": "running", "pid": os.getpid()})
    time.sleep(600)


def long_messages(info: RankInfo, control: RankControl) -> None:
    for number in range(50):
        control.send({"kind": "long", "number": number, "text": "é" * 50_000})


def watched_hang(conn: Connection, log_path: Path) -> None:
    """What a rank under torchrun does: nobody but its own watchdog sees it hang."""
    from meshwright.launch.watchdog import Watchdog

    with Watchdog(0.5, log_path, start_timeout_s=60.0) as control:
        for step in range(20):
            control.beat(step)
            time.sleep(0.05)  # 1 s in all: a beat has to start the time anew
        send(conn, ("message", "now"))
        lost_in_thought()


def watched_until_stopped(conn: Connection) -> list[bool]:
    from meshwright.launch.watchdog import Watchdog

    old = signal.getsignal(signal.SIGINT)
    with Watchdog(60.0) as control:
        before = control.stop_requested
        control.say("watching")
        send(conn, ("message", "now"))
        while not control.stop_requested:
            time.sleep(0.01)
        send(conn, ("message", "stopping"))
        try:
            time.sleep(600)
            second = False
        except KeyboardInterrupt:
            second = True
    return [before, control.stop_requested, second, signal.getsignal(signal.SIGINT) == old]
