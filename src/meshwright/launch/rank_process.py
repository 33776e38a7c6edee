"""The life of one forked rank, from just after the fork to its exit. Never returns to the launcher's code."""

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from meshwright.errors import UserError
from meshwright.launch.control import HeartbeatTable, LocalControl, RankControl
from meshwright.launch.environment import RankInfo, local_environment
from meshwright.launch.failures import describe_exception

Target = Callable[[RankInfo, RankControl], None]

# Writes every thread's stack into the rank's log, as it does in a Java machine. SIGTERM, SIGUSR1 and SIGUSR2 stay
# free: schedulers use them to announce pre-emption.
STACK_SIGNAL = signal.SIGQUIT

_PR_SET_PDEATHSIG = 1
# Loaded before any fork: a child should not have to take the loader's locks.
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class RankStart:
    """What a fresh rank is born with."""

    info: RankInfo
    target: Target
    table: HeartbeatTable
    pipe_fd: int
    listen_fd: int
    log_path: Path
    threads: int
    launcher_pid: int
    fds_to_close: tuple[int, ...]


def live(start: RankStart) -> None:
    """Run the rank to its end and exit the process; never returns, whatever happens."""
    exit_code = 1
    try:
        control = _settle(start)
        exit_code = _work(start, control)
    except BaseException:
        traceback.print_exc()
    finally:
        _exit(exit_code)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, so that a killed launcher leaves no orphans."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died before the kernel had been told
        os._exit(1)


def redirect_output(log_path: Path) -> None:
    """Send stdout and stderr of this process, C++ libraries' included, to the end of `log_path`."""
    fd = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    # New objects: the old ones may be a test runner's, or hold text that the launcher will print itself.
    sys.stdout, sys.stderr = _line_buffered(1), _line_buffered(2)


def _line_buffered(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)


def _settle(start: RankStart) -> LocalControl:
    die_with_parent(start.launcher_pid)
    os.setpgid(0, 0)
    # Ctrl-C is the launcher's to understand: it asks for a clean stop through the shared memory.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for fd in start.fds_to_close:
        os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    redirect_output(start.log_path)
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    os.environ.update(local_environment(start.info))
    listen_fd: int | None = start.listen_fd
    if start.info.rank != 0:
        os.close(start.listen_fd)
        listen_fd = None
    return LocalControl(start.info.rank, start.table, start.pipe_fd, listen_fd)


def _work(start: RankStart, control: LocalControl) -> int:
    import torch

    gc.freeze()  # what the launcher imported stays: no collection has to walk it, or to copy its shared pages
    torch.set_num_threads(start.threads)
    start.table.beat(start.info.rank, -1)
    try:
        start.target(start.info, control)
    except SystemExit as leaving:
        if leaving.code is not None and leaving.code != 0:
            if isinstance(leaving.code, str):
                print(leaving.code, file=sys.stderr)
            return leaving.code if isinstance(leaving.code, int) else 1
    except BaseException as error:
        time_s = time.monotonic()
        traceback.print_exc()  # first: once the launcher knows, it ends this process
        control.write_frame("error", describe_exception(error, time_s))
        return 2 if isinstance(error, UserError) else 1
    control.write_frame("done", {})
    return 0


def _exit(exit_code: int) -> None:
    # os._exit: the exit handlers were registered by the launcher, for the launcher.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # there may be nowhere left to write it
            stream.flush()
    os._exit(exit_code)
