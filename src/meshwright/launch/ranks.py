"""The launcher's side of its forked ranks: their pipes, their exits, and how they are ended without leaving zombies."""

import contextlib
import json
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from meshwright.launch.control import OnMessage
from meshwright.launch.failures import Failure, failure_from_exception, failure_from_exit

# How long the kernel may take to end a killed process (one that holds a GPU frees its memory first).
_KILL_PATIENCE_S = 30.0


@dataclass
class _Rank:
    rank: int
    pid: int
    read_fd: int
    log_path: Path
    pid_fd: int
    is_done: bool = False
    has_failed: bool = False
    unread: bytearray = field(default_factory=bytearray)


class Ranks:
    """Ranks that were forked and not yet reaped, and what became of the others.

    All waiting goes through `selector`, whose data are the functions to call, so that nothing is ever polled.
    """

    def __init__(self, on_message: OnMessage) -> None:
        self.all: dict[int, _Rank] = {}
        self.living: set[int] = set()
        self.failures: list[Failure] = []
        self.selector = selectors.DefaultSelector()
        self._on_message = on_message
        self._is_ending = False

    def add(self, rank: int, pid: int, read_fd: int, log_path: Path) -> None:
        """Take charge of a forked rank and of the reading end of its pipe."""
        who = _Rank(rank, pid, read_fd, log_path, os.pidfd_open(pid))
        os.set_blocking(read_fd, False)
        self.all[rank] = who
        self.living.add(rank)
        self.selector.register(who.read_fd, selectors.EVENT_READ, lambda: self._read(who))
        self.selector.register(who.pid_fd, selectors.EVENT_READ, lambda: self._reap(who))

    def open_fds(self) -> list[int]:
        """List the launcher's descriptors, which a new rank has to close."""
        return [fd for who in self.all.values() for fd in (who.read_fd, who.pid_fd)]

    def pump(self, timeout_s: float) -> None:
        """Wait for something to happen, `timeout_s` at most, and deal with all that has."""
        events = self.selector.select(timeout_s)
        for key, _ in events:
            handle: Callable[[], None] = key.data
            handle()

    def end_all(self, grace_s: float) -> None:
        """End every living rank and what it started: SIGTERM, and SIGKILL after `grace_s`."""
        self._is_ending = True
        if grace_s > 0:
            self._signal_all(signal.SIGTERM)
            self._signal_all(signal.SIGCONT)  # a stopped process would not hear of it
            self._wait_for_exits(grace_s)
        self._signal_all(signal.SIGKILL)
        self._wait_for_exits(_KILL_PATIENCE_S)

    def close(self) -> None:
        """Close what is still open."""
        for who in self.all.values():
            self._close_rank(who)
        self.selector.close()

    def _wait_for_exits(self, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while self.living and (left_s := deadline_s - time.monotonic()) > 0:
            self.pump(left_s)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self.living:
            _signal_group(self.all[rank].pid, number)

    def _read(self, who: _Rank) -> None:
        """Read what has come, message by message."""
        while who.read_fd >= 0:
            try:
                piece = os.read(who.read_fd, 1 << 16)
            except BlockingIOError:
                return
            if not piece:
                self.selector.unregister(who.read_fd)
                os.close(who.read_fd)
                who.read_fd = -1
                return
            who.unread += piece
            *lines, rest = who.unread.split(b"\n")
            who.unread = bytearray(rest)
            for line in lines:
                self._take(who, bytes(line))

    def _take(self, who: _Rank, line: bytes) -> None:
        kind, body = json.loads(line)
        if kind == "message":
            # While ranks are being ended nothing may come between them and their end, least of all a callback
            # that fails because the terminal is gone.
            if not self._is_ending:
                self._on_message(who.rank, body)
        elif kind == "done":
            who.is_done = True
        elif kind == "error":
            who.has_failed = True
            if not self._is_ending:
                self.failures.append(failure_from_exception(who.rank, body))
        # "first beat" needs no answer: it has made the launcher look at its clocks again.

    def _reap(self, who: _Rank) -> None:
        if who.rank not in self.living:
            return
        self._read(who)
        # Before the process is reaped its number, which is its group's too, cannot belong to anybody else.
        _signal_group(who.pid, signal.SIGKILL)
        _, status = os.waitpid(who.pid, 0)
        self.living.discard(who.rank)
        self._close_rank(who)
        exit_code = os.waitstatus_to_exitcode(status)
        finished = who.is_done and exit_code == 0
        if not (finished or who.has_failed or self._is_ending):
            self.failures.append(failure_from_exit(who.rank, time.monotonic(), exit_code))

    def _close_rank(self, who: _Rank) -> None:
        for name in ("read_fd", "pid_fd"):
            fd = getattr(who, name)
            if fd >= 0:
                self.selector.unregister(fd)
                os.close(fd)
                setattr(who, name, -1)


def _signal_group(pid: int, number: signal.Signals) -> None:
    for send in (os.killpg, os.kill):  # the process itself too: it may not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, number)
