"""`RankControl` for a rank that torchrun or srun started: nobody of ours watches it, so it watches itself. No torch."""

import faulthandler
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from meshwright.errors import UserError
from meshwright.launch.control import OnMessage, text_message


class Watchdog:
    """Ends this process, with the stacks of its threads on paper, when it stays too long in one step.

    A thread inside the interpreter's runtime keeps the time, so a rank stuck in a collective is caught too. Use it
    as a context manager: it also turns the first Ctrl-C into `stop_requested`, and gives the second its old effect.
    """

    def __init__(
        self,
        timeout_s: float,
        log_path: Path | None = None,
        *,
        rank: int = 0,
        start_timeout_s: float = 1800.0,
        on_message: OnMessage | None = None,
    ) -> None:
        """Prepare to watch `rank`: `timeout_s` between two beats, `start_timeout_s` before the first.

        Stacks go to the end of `log_path`, or to stderr. What the rank says goes to `on_message`, or to stderr.
        """
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._log_path = log_path
        self._rank = rank
        self._on_message = on_message
        self._log: TextIO | None = None
        self._stop_requested = False
        self._old_handler: Callable[..., Any] | int | None = None
        self._handles_interrupt = False

    def __enter__(self) -> "Watchdog":
        if self._log_path is not None:
            try:
                self._log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = self._log_path.open("a", encoding="utf-8")
            except OSError as error:
                raise UserError(f"the log {self._log_path} cannot be written: {error.strerror}") from error
        self._arm(self._start_timeout_s)
        self._handles_interrupt = threading.current_thread() is threading.main_thread()
        if self._handles_interrupt:
            self._old_handler = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._handles_interrupt:
            signal.signal(signal.SIGINT, self._old_handler)
        if self._log is not None:
            self._log.close()

    @property
    def listen_fd(self) -> int | None:
        """None: the launcher named a port."""
        return None

    @property
    def stop_requested(self) -> bool:
        """Whether this rank got a Ctrl-C."""
        return self._stop_requested

    def beat(self, step: int) -> None:
        """Start the time limit anew."""
        self._arm(self._timeout_s)

    def say(self, text: str) -> None:
        """Show one line."""
        self.send(text_message(text))

    def send(self, message: Mapping[str, Any]) -> None:
        """Hand `message` to `on_message`; without one, lines of text go to stderr."""
        if self._on_message is not None:
            self._on_message(self._rank, dict(message))
        elif message.get("kind") == "say":
            print(message["text"], file=sys.stderr, flush=True)

    def _arm(self, timeout_s: float) -> None:
        # File number 2, not sys.stderr: a test runner's has no file number.
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=2 if self._log is None else self._log)

    def _on_interrupt(self, *_: object) -> None:
        self._stop_requested = True
        signal.signal(
            signal.SIGINT, signal.default_int_handler if self._old_handler is None else self._old_handler
        )
