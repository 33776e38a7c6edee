"""A clean process to fork from, started before the tests can run a torch operation.

A process that has run torch on several threads cannot be forked safely (GNU OpenMP), and pytest's own process soon
has. The zygote is forked from it first, imports what it is told to on one thread, and forks everything that tests
need: ranks of the pool, launchers of the launch tests. All it shares with the tests is its own pickled messages.
"""

import ctypes
import faulthandler
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from meshwright.launch.failures import is_communication_error

STACK_SIGNAL = signal.SIGQUIT
_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG = 1


class RemoteTraceback(Exception):
    """The traceback, as text, of an exception in another process; shown as the cause of the one raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class Zygote:
    """The tests' side of the clean process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = _fork()
        if self.pid == 0:
            try:
                self._control.close()
                _die_with(parent)
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                _serve_forks(theirs)
            finally:
                os._exit(0)
        theirs.close()
        self._imported: set[str] = set()

    def knows(self, module: str) -> bool:
        """Whether processes forked from now on have `module` already."""
        return module in self._imported

    def fork(self, count: int, modules: Sequence[str]) -> "list[Forked]":
        """Import `modules`, then fork `count` processes that wait for jobs."""
        ours, theirs, fds = [], [], []
        for _ in range(count):
            a, b = socket.socketpair()
            output_fd = os.memfd_create("output", os.MFD_CLOEXEC)
            ours.append((Connection(a.detach()), output_fd))
            theirs.append(b)
            fds += [b.fileno(), output_fd]
        pids = self._ask("fork", list(modules), fds=fds)
        for end in theirs:
            end.close()
        self._imported |= set(modules)
        return [Forked(self, pid, conn, fd) for pid, (conn, fd) in zip(pids, ours, strict=True)]

    def end(self, pids: Sequence[int]) -> list[int]:
        """Kill processes where they still live and return their exit codes (negative: the signal)."""
        codes: list[int] = self._ask("end", list(pids))
        return codes

    def close(self) -> None:
        """End the zygote; what it forked dies with it."""
        self._control.close()
        os.waitpid(self.pid, 0)

    def _ask(self, *request: Any, fds: Sequence[int] = ()) -> Any:
        socket.send_fds(self._control, [pickle.dumps(request)], fds)
        reply = self._control.recv(1 << 20)
        if not reply:
            raise RuntimeError("the process that tests fork from has died")
        what, value = pickle.loads(reply)
        if what == "error":
            raise RuntimeError(f"the process that tests fork from failed:\n{value}")
        return value


class Forked:
    """A process forked from the zygote: does one job after the other, output kept in memory."""

    def __init__(self, zygote: Zygote, pid: int, conn: Connection, output_fd: int) -> None:
        self.pid = pid
        self.conn = conn
        self._zygote = zygote
        self._output_fd = output_fd

    def start(self, fn: Callable[..., Any], *args: Any) -> None:
        """Send the job `fn(conn, *args)`."""
        self.send((fn, args))

    def send(self, value: Any) -> None:
        send(self.conn, value)

    def receive(self, timeout_s: float) -> Any:
        """Wait for a message. Raises TimeoutError, or EOFError where the process ended."""
        if not self.conn.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} said nothing within {timeout_s:g} s\n{self.output()}")
        return receive(self.conn)

    def result(self, timeout_s: float) -> Any:
        """Wait for the end of the job; return its value or raise its exception."""
        what, value = self.receive(timeout_s)
        if what == "error":
            raise value.rebuild("")
        assert what == "result"
        return value

    def output_size(self) -> int:
        return os.fstat(self._output_fd).st_size

    def output(self, start: int = 0) -> str:
        """What the process wrote on stdout and stderr since byte `start`."""
        return os.pread(self._output_fd, 1 << 20, start).decode(errors="replace")

    def end(self) -> int:
        """Kill the process if it lives and return its exit code."""
        (code,) = self._zygote.end([self.pid])
        self.close()
        return code

    def close(self) -> None:
        self.conn.close()
        os.close(self._output_fd)


class Raised:
    """An exception on its way to the tests: when, what, and where."""

    def __init__(self, error: BaseException) -> None:
        self.time_s = time.monotonic()
        self.is_consequence = is_communication_error(error)
        self.trace = "".join(traceback.format_exception(error))
        self.pickled = b""
        try:
            self.pickled = pickle.dumps(error)
            pickle.loads(self.pickled)
        except Exception:  # any exception may refuse to be pickled in any way
            self.pickled = b""

    def rebuild(self, heading: str) -> BaseException:
        """Build the exception to raise in the test, its traceback in the other process as its cause."""
        trace = f"{heading}{self.trace}"
        error = pickle.loads(self.pickled) if self.pickled else RuntimeError(trace)
        error.__cause__ = RemoteTraceback(trace)
        return error


def send(conn: Connection, value: Any) -> None:
    """Send by plain pickle: torch changes Connection.send to pass tensors as shared memory."""
    conn.send_bytes(pickle.dumps(value))


def receive(conn: Connection) -> Any:
    return pickle.loads(conn.recv_bytes())


def _fork() -> int:
    with warnings.catch_warnings():
        # Python 3.12 and newer warn of threads beside a fork; the only ones here are OpenBLAS's, which allows it.
        warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
        return os.fork()


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def _serve_forks(control: socket.socket) -> None:
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 16, 128)
        if not message:
            return
        verb, *rest = pickle.loads(message)
        try:
            if verb == "fork":
                answer: Any = _fork_all(control, rest[0], fds)
            else:
                # One that is already on its way out keeps the exit code it chose.
                for pid in rest[0]:
                    os.kill(pid, signal.SIGKILL)
                answer = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in rest[0]]
            reply = ("ok", answer)
        except Exception:
            reply = ("error", traceback.format_exc())
        for fd in fds:
            os.close(fd)
        control.send(pickle.dumps(reply))


def _fork_all(control: socket.socket, modules: list[str], fds: list[int]) -> list[int]:
    for module in modules:
        importlib.import_module(module)
        if module == "torch":
            # One thread from the start: no module imported later can start a thread pool that a fork would break.
            sys.modules["torch"].set_num_threads(1)
    gc.freeze()  # what is imported stays: no collection in a forked process has to walk it, or copy its pages
    parent, pids = os.getpid(), []
    for place in range(0, len(fds), 2):
        pid = _fork()
        if pid == 0:
            try:
                control.close()
                _die_with(parent)
                for fd in fds[:place] + fds[place + 2 :]:
                    os.close(fd)
                _serve_jobs(fds[place], fds[place + 1])
            finally:
                os._exit(0)
        pids.append(pid)
    return pids


def _serve_jobs(conn_fd: int, output_fd: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output_fd, 1), (output_fd, 2)):
        os.dup2(source, target)
    for fd in (null, output_fd):
        os.close(fd)
    sys.stdout, sys.stderr = (open(fd, "w", buffering=1, closefd=False) for fd in (1, 2))  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(STACK_SIGNAL, file=2, all_threads=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Connection(conn_fd) as conn:
        while True:
            try:
                fn, args = receive(conn)
            except EOFError:
                return
            except BaseException as error:  # a module of the test's that cannot be imported
                send(conn, ("error", Raised(error)))
                continue
            try:
                answer = ("result", fn(conn, *args))
                send(conn, answer)
            except BaseException as error:
                send(conn, ("error", Raised(error)))
