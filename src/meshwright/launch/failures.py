"""Which rank is at fault when several fail, and how its end is told in one sentence.

When a rank dies, the others die of it: their collectives fail with "Connection closed by peer". Those are
consequences, and a user who is shown one of them looks in the wrong log.
"""

import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from meshwright.errors import RunFailed, UserError

# What gloo, NCCL, RCCL and the store say when a peer is gone or late. Only errors of the type RuntimeError (which
# is what C++ errors become) and of torch's DistError family are looked at.
_COMMUNICATION_SIGNS = (
    "closed by peer",
    "reset by peer",
    "connection refused",
    "broken pipe",
    "gloo",
    "nccl",
    "rccl",
    "tcpstore",
    "socket timeout",
    "timed out waiting",
    "wait timeout",
)


@dataclass(frozen=True)
class Failure:
    """How one rank ended badly.

    `time_s` is on the clock of `time.monotonic`. `is_consequence` says that the rank only noticed that another was
    gone. `sentence` continues "rank 3 of 8 ...", or where `is_quote` is what the rank itself has said.
    """

    rank: int
    time_s: float
    sentence: str
    is_quote: bool = False
    is_user_error: bool = False
    is_consequence: bool = False


def is_communication_error(error: BaseException) -> bool:
    """Whether `error`, or an error it was raised from, is one that another rank's death causes."""
    return any(_is_communication(link) for link in _chain(error))


def describe_exception(error: BaseException, time_s: float) -> dict[str, Any]:
    """Reduce an exception to what a rank tells its launcher, as JSON values."""
    text = str(error).strip()
    # C++ errors have many lines, of which the first says what happened and the rest are the C++ stack.
    first_line = text.splitlines()[0] if text else ""
    name = type(error).__name__
    return {
        "time_s": time_s,
        "text": text,
        "last_line": f"{name}: {first_line}" if first_line else name,
        "is_user_error": isinstance(error, UserError),
        "is_run_failed": isinstance(error, RunFailed),
        "is_communication": is_communication_error(error),
    }


def failure_from_exception(rank: int, told: dict[str, Any]) -> Failure:
    """Read what `describe_exception` wrote on the other side."""
    speaks_for_itself = bool((told["is_user_error"] or told["is_run_failed"]) and told["text"])
    return Failure(
        rank=rank,
        time_s=told["time_s"],
        sentence=told["text"] if speaks_for_itself else f"failed: {told['last_line']}",
        is_quote=speaks_for_itself,
        is_user_error=told["is_user_error"],
        is_consequence=told["is_communication"] and not speaks_for_itself,
    )


def failure_from_exit(rank: int, time_s: float, exit_code: int) -> Failure:
    """Describe a rank that ended without a word; `exit_code` is negative for a signal, as in subprocess."""
    if exit_code == -signal.SIGKILL:
        sentence = "was killed (SIGKILL), perhaps by the kernel for lack of memory"
    elif exit_code < 0:
        sentence = f"was ended by {_signal_name(-exit_code)}"
    elif exit_code == 0:
        sentence = "ended before its work was done, with exit status 0"
    else:
        sentence = f"ended with exit status {exit_code}"
    return Failure(rank, time_s, sentence)


def culprit(failures: Iterable[Failure]) -> Failure:
    """Choose the failure that explains the others: the earliest that is not a mere consequence, else the earliest."""
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time_s))


def to_exception(failure: Failure, world_size: int, log_path: str) -> Exception:
    """Build what the launcher raises for the run's failure."""
    if failure.is_user_error:
        return UserError(failure.sentence)
    colon = ":" if failure.is_quote else ""
    return RunFailed(f"rank {failure.rank} of {world_size}{colon} {failure.sentence} (log: {log_path})")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _is_communication(error: BaseException) -> bool:
    # By name, because this file is read by processes that have not imported torch.
    if any(cls.__name__ == "DistError" for cls in type(error).__mro__):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(sign in text for sign in _COMMUNICATION_SIGNS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
