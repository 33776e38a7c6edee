"""Ranks that are forked once and serve many tests: `pool.run(world_size, fn, *args)`.

Starting eight ranks costs seconds of imports; here a case costs a process group of its own and nothing else.
"""

import gc
import os
import pickle
import re
import signal
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

from meshwright.launch.environment import LOOPBACK, local_environment, local_rank_info
from tests.distributed.zygote import STACK_SIGNAL, Forked, Raised, Zygote, receive, send

# How long after the first exception the others may still show that theirs came first: it was sent by a process
# that runs beside them, and a rank that lost its peer hears of it within milliseconds.
_SETTLE_S = 0.3
_Filter = tuple[str, str, Any, str, int]
_MODULES = ("torch", "torch.distributed", "meshwright.launch.process_group")


class RankPool:
    """Up to `size` ranks on this host, over gloo, one thread each."""

    def __init__(self, zygote: Zygote, size: int = 8) -> None:
        self.size = size
        self._zygote = zygote
        self._ranks: list[Forked] = []

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call `fn(info, *args)` on each of `world_size` ranks inside a fresh process group; return their results.

        `fn` is a function at the top of a module; arguments and results are pickled (tensors on the CPU). An
        exception of a rank is raised here, with the rank's traceback as its cause; of several, the one that is not
        merely "connection closed by peer". After `timeout_s` every rank's stack is in the TimeoutError raised. A
        case that fails costs the ranks, so the next case finds fresh ones.
        """
        if not 1 <= world_size <= self.size:
            raise ValueError(f"world_size {world_size} is not in 1..{self.size}")
        pickle.dumps((fn, args))  # fails here, not half way, for what cannot be sent
        ranks = self._fresh_enough(fn.__module__)[:world_size]
        starts = [rank.output_size() for rank in ranks]
        deadline_s = time.monotonic() + timeout_s
        filters = _plain_filters()
        is_good = False
        try:
            ranks[0].start(_run_case, 0, world_size, None, filters, fn, args)
            # Rank 0 listens first and names the port, so no port is ever guessed.
            (port,) = self._answers(ranks[:1], "port", starts, deadline_s, timeout_s)
            for number, rank in enumerate(ranks[1:], start=1):
                rank.start(_run_case, number, world_size, port, filters, fn, args)
            results = self._answers(ranks, "done", starts, deadline_s, timeout_s)
            # Rank 0 has the store: all leave together.
            for rank in ranks:
                rank.send("leave")
            self._answers(ranks, "result", starts, deadline_s, timeout_s)
            is_good = True
        finally:
            if not is_good:
                self.close()
        return results

    def close(self) -> None:
        """End all ranks; the next case starts new ones."""
        if self._ranks:
            self._zygote.end([rank.pid for rank in self._ranks])
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _fresh_enough(self, module: str) -> list[Forked]:
        """Return ranks that have `module`: imported once before the fork rather than once in each rank."""
        if not self._zygote.knows(module):
            self.close()
        if not self._ranks:
            self._ranks = self._zygote.fork(self.size, [*_MODULES, module])
        return self._ranks

    def _answers(
        self, ranks: Sequence[Forked], kind: str, starts: Sequence[int], deadline_s: float, timeout_s: float
    ) -> list[Any]:
        """Wait until every rank has answered with a message of `kind`; raise what went wrong otherwise."""
        answers: dict[int, Any] = {}
        raised: dict[int, Raised | None] = {}
        number_of = {rank.conn: number for number, rank in enumerate(ranks)}
        settled_s = deadline_s
        while len(answers) + len(raised) < len(ranks):
            left_s = (settled_s if raised else deadline_s) - time.monotonic()
            open_ones = [
                conn for conn, number in number_of.items() if number not in answers and number not in raised
            ]
            ready = wait(open_ones, max(0.0, left_s))
            if not ready:
                break
            for conn in ready:
                assert isinstance(conn, Connection)
                number = number_of[conn]
                try:
                    what, value = receive(conn)
                except (EOFError, ConnectionError):
                    what, value = "error", None
                if what == "error":
                    raised[number] = value
                    settled_s = min(settled_s, time.monotonic() + _SETTLE_S)
                else:
                    assert what == kind, (what, kind)
                    answers[number] = value
        if raised:
            self._raise(ranks, raised, starts)
        if len(answers) < len(ranks):
            silent = [number for number in range(len(ranks)) if number not in answers]
            self._raise_timeout(ranks, silent, starts, timeout_s)
        return [answers[number] for number in range(len(ranks))]

    def _raise(
        self, ranks: Sequence[Forked], raised: dict[int, Raised | None], starts: Sequence[int]
    ) -> NoReturn:
        dead = [number for number, error in raised.items() if error is None]
        if dead:
            number = dead[0]
            (code,) = self._zygote.end([ranks[number].pid])
            self._forget(ranks[number])
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise RuntimeError(
                f"rank {number} of {len(ranks)} died: {how}\n{ranks[number].output(starts[number])}"
            )
        errors = {number: error for number, error in raised.items() if error is not None}
        number = min(errors, key=lambda number: (errors[number].is_consequence, errors[number].time_s))
        output = ranks[number].output(starts[number])
        heading = f"rank {number} of {len(ranks)}" + (f", which wrote:\n{output}" if output else ":") + "\n"
        raise errors[number].rebuild(heading)

    def _raise_timeout(
        self, ranks: Sequence[Forked], silent: Sequence[int], starts: Sequence[int], timeout_s: float
    ) -> NoReturn:
        for rank in ranks:
            os.kill(rank.pid, STACK_SIGNAL)
        time.sleep(0.5)  # a stack is written within milliseconds, unless this machine is very busy
        stacks = "\n".join(f"--- rank {n} wrote:\n{rank.output(starts[n])}" for n, rank in enumerate(ranks))
        raise TimeoutError(
            f"no answer from ranks {list(silent)} of {len(ranks)} within {timeout_s:g} s\n{stacks}"
        )

    def _forget(self, rank: Forked) -> None:
        # Its process has been waited for; the others are ended by close().
        self._ranks = [other for other in self._ranks if other is not rank]


def _run_case(
    conn: Connection,
    rank: int,
    world_size: int,
    port: int | None,
    filters: list[_Filter],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Do one rank's part of a case, in the rank."""
    import torch
    import torch.distributed as dist

    from meshwright.launch.process_group import init_process_group

    listen_fd = None
    if rank == 0:
        listener = socket.create_server((LOOPBACK, 0), backlog=64)
        port = listener.getsockname()[1]
        listen_fd = listener.detach()
        send(conn, ("port", port))
    assert port is not None
    info = local_rank_info(rank, world_size, port)
    os.environ.update(local_environment(info))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is pytest's
    # What the case before may have left.
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    gc.collect()
    with warnings.catch_warnings():
        for action, message, category, module, line in reversed(filters):
            warnings.filterwarnings(action, message, category, module, line)  # type: ignore[arg-type]
        init_process_group(info, "cpu", timeout_s=600.0, listen_fd=listen_fd)
        send(conn, ("done", fn(info, *args)))
        assert receive(conn) == "leave"
        dist.destroy_process_group()


def _plain_filters() -> list[_Filter]:
    """List the warning filters in force in this test, so that a warning in a rank is an error there too."""
    return [
        (action, _pattern(message), category, _pattern(module), line)
        for action, message, category, module, line in warnings.filters
    ]


def _pattern(of: re.Pattern[str] | str | None) -> str:
    # The interpreter's own filters hold plain names.
    return of.pattern if isinstance(of, re.Pattern) else of or ""
