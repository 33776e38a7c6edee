"""All ranks of a run on this host: torch is imported once, then the ranks are forked.

Eight fresh interpreters that import torch take many seconds of work; eight forks of one that has imported it take
a twentieth of a second. The price is a rule: before the fork the launcher may start no thread pool and no device.
GNU OpenMP and CUDA do not survive a fork, so no torch operation is run on the launcher's side, here or in callers.
"""

import os
import selectors
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.errors import RunFailed, UserError
from meshwright.launch.capacity import check_host_capacity, cores_available
from meshwright.launch.control import HeartbeatTable, OnMessage
from meshwright.launch.environment import LOOPBACK, local_rank_info
from meshwright.launch.failures import culprit, to_exception
from meshwright.launch.rank_process import RankStart, Target, live
from meshwright.launch.ranks import Ranks
from meshwright.launch.stacks import AskedRank, gather_stacks, name_ranks, show_stacks, step_name

__all__ = ["check_host_capacity", "run_local"]

# How long to wait for the rank at fault when the first to fail only lost its connection to another.
CULPRIT_WAIT_S = 3.0
# How long ranks may take to end after SIGTERM before they are killed.
TERM_GRACE_S = 3.0
# The operating system's wait takes no infinite limit.
_LONGEST_WAIT_S = 3600.0


def run_local(
    target: Target,
    world_size: int,
    log_dir: Path,
    *,
    hang_timeout_s: float,
    start_timeout_s: float = 1800.0,
    threads_per_rank: int | None = None,
    on_message: OnMessage | None = None,
    on_notice: Callable[[str], None] | None = None,
) -> None:
    """Run `target(info, control)` on `world_size` ranks of this host and wait for all of them.

    Each rank's output goes to the end of `log_dir/rank-N.log`. `on_message(rank, message)` is called here for what
    ranks `say` and `send`, `on_notice(text)` for the launcher's own lines; both print to stderr by default.
    A rank that does not beat for `hang_timeout_s`, or for `start_timeout_s` before its first step, is held to
    hang: the stacks of all are shown and written to `log_dir/hang-stacks.txt`, and the run fails. `threads_per_rank`
    is by default this host's cores divided by the ranks. Ctrl-C asks the ranks to stop and returns when they have; a
    second one kills them and raises KeyboardInterrupt.

    Raises UserError with the rank's own words where a rank raised one, RunFailed naming the first failing rank and
    its log for any other failure. No rank outlives this call, nor the death of this process. Call it before this
    process has started threads or run any torch operation.
    """
    if world_size < 1:
        raise UserError(f"a run of {world_size} ranks is not possible: at least 1 is needed")
    if not hasattr(os, "pidfd_open"):
        raise UserError("starting ranks needs Linux; on this system start them with torchrun")
    _make_log_dir(log_dir)
    _import_torch()
    threads = threads_per_rank or max(1, cores_available() // world_size)
    table = HeartbeatTable(world_size)
    ranks = Ranks(on_message or _print_message)
    interrupts = _Interrupts(table)
    try:
        with interrupts:
            _fork_ranks(ranks, target, world_size, log_dir, table, threads)
            launcher = _Launcher(ranks, table, interrupts, log_dir, hang_timeout_s, start_timeout_s)
            launcher.on_notice = on_notice or _print_notice
            launcher.wait()
    finally:
        ranks.end_all(grace_s=0.0)  # nobody is left unless something unforeseen was raised
        ranks.close()
        table.close()


class _Launcher:
    """Watches the ranks until all have ended, one has failed, one hangs, or the user has had enough."""

    def __init__(
        self,
        ranks: Ranks,
        table: HeartbeatTable,
        interrupts: "_Interrupts",
        log_dir: Path,
        hang_timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        self.ranks = ranks
        self.table = table
        self.interrupts = interrupts
        self.log_dir = log_dir
        self.hang_timeout_s = hang_timeout_s
        self.start_timeout_s = start_timeout_s
        self.on_notice: Callable[[str], None] = _print_notice

    def wait(self) -> None:
        told_of_stop = False
        self.ranks.selector.register(self.interrupts.wake, selectors.EVENT_READ, self.interrupts.drain)
        while self.ranks.living:
            self.ranks.pump(self._next_look_s())
            if self.interrupts.count >= 2:
                self.ranks.end_all(grace_s=0.0)
                raise KeyboardInterrupt
            if self.interrupts.count == 1 and not told_of_stop:
                told_of_stop = True
                self.on_notice("stopping at the end of this step; press Ctrl-C again to end at once")
            if self.ranks.failures and self._is_clear():
                break
            if not self.ranks.failures and self._is_late():
                self._fail_for_hang()
        if self.ranks.failures:
            self._fail()

    def _next_look_s(self) -> float:
        """How long nothing can need attention unless a rank or the user makes itself heard, s."""
        now_s = time.monotonic()
        if self.ranks.failures:
            return max(0.0, self._clear_at_s() - now_s)
        next_s = min(self._late_at_s(rank) for rank in self.ranks.living) - now_s
        return min(max(0.0, next_s), _LONGEST_WAIT_S)

    def _late_at_s(self, rank: int) -> float:
        beat_s, step = self.table.last_beat(rank)
        return beat_s + (self.start_timeout_s if step < 0 else self.hang_timeout_s)

    def _is_late(self) -> bool:
        now_s = time.monotonic()
        return any(self._late_at_s(rank) <= now_s for rank in self.ranks.living)

    def _clear_at_s(self) -> float:
        return min(failure.time_s for failure in self.ranks.failures) + CULPRIT_WAIT_S

    def _is_clear(self) -> bool:
        """Whether the rank at fault is known, or has had its time to show."""
        if any(not failure.is_consequence for failure in self.ranks.failures):
            return True
        return time.monotonic() >= self._clear_at_s()

    def _fail(self) -> None:
        failure = culprit(self.ranks.failures)
        if failure.is_consequence and self.ranks.living:
            # A collective that ran into its time limit: what the others were doing is the answer.
            self._write_stacks()
        self.ranks.end_all(TERM_GRACE_S)
        raise to_exception(failure, len(self.ranks.all), str(self.ranks.all[failure.rank].log_path))

    def _fail_for_hang(self) -> None:
        # Ranks that wait for the one at fault fall silent a moment before or after it, so all are named whose
        # silence is of the same order.
        now_s = time.monotonic()
        silent: dict[int, list[int]] = {}
        for rank in sorted(self.ranks.living):
            beat_s, step = self.table.last_beat(rank)
            if now_s - beat_s > (self._late_at_s(rank) - beat_s) / 2:
                silent.setdefault(step, []).append(rank)
        if not silent:  # the late rank spoke up just now
            return
        limit_s = self.hang_timeout_s if max(silent) >= 0 else self.start_timeout_s
        places = "; ".join(
            f"{name_ranks(ranks)} last at {step_name(step)}" for step, ranks in sorted(silent.items())
        )
        path = self._write_stacks()
        self.ranks.end_all(TERM_GRACE_S)
        raise RunFailed(
            f"the run hangs, with no sign of life for {limit_s:g} s: {places} "
            f"(of {len(self.ranks.all)} ranks; where each stands: {path})"
        )

    def _write_stacks(self) -> Path:
        living = sorted(self.ranks.living)
        asked = {rank: AskedRank(self.ranks.all[rank].pid, self.ranks.all[rank].log_path) for rank in living}
        steps = {rank: self.table.last_beat(rank)[1] for rank in living}
        stacks = gather_stacks(asked)
        path = self.log_dir / "hang-stacks.txt"
        path.write_text(
            "\n".join(f"== rank {rank}, last at {step_name(steps[rank])}\n{stacks[rank]}" for rank in living),
            encoding="utf-8",
        )
        self.on_notice(show_stacks(stacks, steps))
        return path


class _Interrupts:
    """Counts Ctrl-C while the ranks run; the first one asks them to stop."""

    def __init__(self, table: HeartbeatTable) -> None:
        self.count = 0
        self._table = table
        self.wake, self._ring = socket.socketpair()
        self._old_handler: Any = None
        self._old_wakeup_fd = -1
        # Python lets only the main thread handle signals; a caller in another thread handles Ctrl-C itself.
        self._installs = threading.current_thread() is threading.main_thread()

    def __enter__(self) -> "_Interrupts":
        self.wake.setblocking(False)
        self._ring.setblocking(False)
        if self._installs:
            self._old_handler = signal.signal(signal.SIGINT, self._on_interrupt)
            # The select call is resumed after a signal; a byte on this socket makes it return.
            self._old_wakeup_fd = signal.set_wakeup_fd(self._ring.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        if self._installs:
            signal.set_wakeup_fd(self._old_wakeup_fd)
            signal.signal(signal.SIGINT, self._old_handler)
        self.wake.close()
        self._ring.close()

    def drain(self) -> None:
        try:
            while self.wake.recv(64):
                pass
        except BlockingIOError:
            pass

    def _on_interrupt(self, *_: object) -> None:
        self.count += 1
        self._table.request_stop()


def _fork_ranks(
    ranks: Ranks, target: Target, world_size: int, log_dir: Path, table: HeartbeatTable, threads: int
) -> None:
    launcher_pid = os.getpid()
    # The parent binds the port, so no other process can take it before rank 0 listens.
    with socket.create_server((LOOPBACK, 0), backlog=min(4096, 4 * world_size + 16)) as listener:
        port = listener.getsockname()[1]
        sys.stdout.flush()
        sys.stderr.flush()
        for rank in range(world_size):
            log_path = log_dir / f"rank-{rank}.log"
            read_fd, write_fd = os.pipe()
            start = RankStart(
                info=local_rank_info(rank, world_size, port),
                target=target,
                table=table,
                pipe_fd=write_fd,
                listen_fd=listener.fileno(),
                log_path=log_path,
                threads=threads,
                launcher_pid=launcher_pid,
                fds_to_close=(read_fd, *ranks.open_fds()),
            )
            try:
                pid = _fork_one(start)
            except OSError as error:
                os.close(read_fd)
                raise RunFailed(
                    f"this host refused to start rank {rank} of {world_size}: {error.strerror}"
                ) from error
            finally:
                os.close(write_fd)
            ranks.add(rank, pid, read_fd, log_path)


def _fork_one(start: RankStart) -> int:
    # A Ctrl-C in the moment between fork and the child's own set-up would run the launcher's handler in the child.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with warnings.catch_warnings():
            # Python 3.12 and newer warn of any fork beside threads. Those here are OpenBLAS's, which NumPy starts
            # at import and which knows how to live through a fork.
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            live(start)  # never returns
        return pid
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _import_torch() -> None:
    import torch
    import torch.distributed

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError("a GPU was initialised in the launcher before its ranks were forked")


def _make_log_dir(log_dir: Path) -> None:
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"the ranks' logs cannot be written to {log_dir}: {error.strerror}") from error
    if not os.access(log_dir, os.W_OK | os.X_OK):
        raise UserError(f"the ranks' logs cannot be written to {log_dir}: permission denied")


def _print_message(rank: int, message: dict[str, Any]) -> None:
    if message.get("kind") == "say":
        print(message["text"], file=sys.stderr, flush=True)


def _print_notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
