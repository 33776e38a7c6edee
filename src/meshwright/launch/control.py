"""What a rank and the process that started it tell each other: heartbeats, messages, and the wish to stop.

The trainer sees one interface, `RankControl`, whether its parent is ours (`LocalControl`) or torchrun or srun
(`meshwright.launch.watchdog.Watchdog`). No torch here.
"""

import json
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# What a run shows of its ranks: called in the parent with the rank and its message.
OnMessage = Callable[[int, dict[str, Any]], None]

NO_STEP = -1


class RankControl(Protocol):
    """How a rank reports and is told to stop."""

    @property
    def listen_fd(self) -> int | None:
        """The listening socket for rank 0's store in a local run; give it to `init_process_group`."""

    @property
    def stop_requested(self) -> bool:
        """Whether the user pressed Ctrl-C.

        Ranks may see it at different steps, so they must agree (one rank's word, or a reduction) before they stop.
        """

    def beat(self, step: int) -> None:
        """Say that this rank lives and is at `step`; the first beat ends the longer patience for starting up."""

    def say(self, text: str) -> None:
        """Show one line to the user."""

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand a message of JSON values to whoever shows the run's progress."""


def text_message(text: str) -> dict[str, Any]:
    """Build the message that `say` sends."""
    return {"kind": "say", "text": text}


class HeartbeatTable:
    """Memory shared by the launcher and its ranks: the last beat and step of each rank, and the stop flag.

    Every cell is one aligned 8-byte word with one writer, so it needs no lock.
    """

    _WORDS_PER_RANK = 2

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._memory = mmap.mmap(
            -1, 8 * (1 + self._WORDS_PER_RANK * world_size)
        )  # anonymous, shared over fork
        self._bytes = memoryview(self._memory)
        self._times_s = self._bytes.cast("d")
        self._steps = self._bytes.cast("q")
        for rank in range(world_size):
            self.beat(rank, NO_STEP)

    def beat(self, rank: int, step: int) -> None:
        """Write that `rank` is at `step` now."""
        cell = 1 + self._WORDS_PER_RANK * rank
        self._steps[cell + 1] = step
        self._times_s[cell] = time.monotonic()  # one clock for all processes of a host

    def last_beat(self, rank: int) -> tuple[float, int]:
        """Return the time (`time.monotonic`, s) and step of the last beat; step -1 before the first."""
        cell = 1 + self._WORDS_PER_RANK * rank
        return self._times_s[cell], self._steps[cell + 1]

    @property
    def stop_requested(self) -> bool:
        """Whether a stop was asked for."""
        return self._steps[0] != 0

    def request_stop(self) -> None:
        """Ask every rank to stop at the end of its step."""
        self._steps[0] = 1

    def close(self) -> None:
        """Give the memory back; the table is of no use afterwards."""
        for view in (self._times_s, self._steps, self._bytes):
            view.release()
        self._memory.close()


class LocalControl:
    """`RankControl` of a rank that `run_local` forked: shared memory for beats, a pipe for messages."""

    def __init__(self, rank: int, table: HeartbeatTable, pipe_fd: int, listen_fd: int | None) -> None:
        self._rank = rank
        self._table = table
        self._pipe_fd = pipe_fd
        self._listen_fd = listen_fd
        self._has_beaten = False
        self._lock = threading.Lock()

    @property
    def listen_fd(self) -> int | None:
        """The socket for rank 0's store; None on other ranks."""
        return self._listen_fd

    @property
    def stop_requested(self) -> bool:
        """Whether the launcher got a Ctrl-C."""
        return self._table.stop_requested

    def beat(self, step: int) -> None:
        """Write the heartbeat into the shared memory: no system call, cheap enough for every step."""
        self._table.beat(self._rank, step)
        if not self._has_beaten:
            # The launcher sleeps until the limit for starting up is reached; now the shorter one holds.
            self._has_beaten = True
            self.write_frame("first beat", {})

    def say(self, text: str) -> None:
        """Show one line on the launcher's side."""
        self.send(text_message(text))

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand `message` to the launcher's `on_message`."""
        self.write_frame("message", dict(message))

    def write_frame(self, kind: str, body: Mapping[str, Any]) -> None:
        """Write one line of JSON; what the launcher reads as `kind`."""
        line = memoryview(json.dumps([kind, body]).encode() + b"\n")
        with self._lock:
            while line:
                line = line[os.write(self._pipe_fd, line) :]
