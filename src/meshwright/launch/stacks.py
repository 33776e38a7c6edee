"""Where ranks stand in their Python code: asking for stacks, reading them from the logs, showing the inner frames."""

import contextlib
import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meshwright.launch.rank_process import STACK_SIGNAL

_DUMP_START = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+", re.MULTILINE)
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+|\?\?\?) in (?P<name>.+)$')


@dataclass(frozen=True)
class AskedRank:
    """A rank to ask for its stacks."""

    pid: int
    log_path: Path


def gather_stacks(asked: Mapping[int, AskedRank], patience_s: float = 2.0) -> dict[int, str]:
    """Have each rank write all its threads' stacks into its log and read them back, one text a rank.

    A rank that cannot answer within `patience_s` (it is stopped, or waits inside the kernel) has an empty text.
    """
    starts = {rank: _size(who.log_path) for rank, who in asked.items()}
    for who in asked.values():
        with contextlib.suppress(ProcessLookupError):  # it may have ended in this moment
            os.kill(who.pid, STACK_SIGNAL)
    stacks = dict.fromkeys(asked, "")
    deadline_s = time.monotonic() + patience_s
    waiting = set(asked)
    while waiting and time.monotonic() < deadline_s:
        time.sleep(0.05)
        for rank in sorted(waiting):
            text = _read_from(asked[rank].log_path, starts[rank])
            match = _DUMP_START.search(text)
            # The dump comes in many small writes: it is whole when a second look finds no more.
            if match and text[match.start() :] == stacks[rank]:
                waiting.discard(rank)
            stacks[rank] = text[match.start() :] if match else ""
    return stacks


def inner_frames(stacks: str, most: int = 6) -> list[str]:
    """List the innermost frames of the main thread, one line each: `name  file:line`.

    faulthandler names the newest thread first, so the main thread is the last block.
    """
    blocks = [stacks[match.start() :] for match in _DUMP_START.finditer(stacks)]
    frames: list[str] = []
    for line in blocks[-1].splitlines()[1:] if blocks else []:
        match = _FRAME.match(line)
        if match is None:
            break
        frames.append(f"{match['name']}  {match['file']}:{match['line']}")
    return frames[:most]


def show_stacks(stacks: Mapping[int, str], steps: Mapping[int, int]) -> str:
    """Lay out each rank's last step and innermost frames for a terminal, ranks at the same place together."""
    places: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for rank, text in sorted(stacks.items()):
        frames = inner_frames(text) or [
            "no answer: the process is stopped, or waits inside the kernel or a driver"
        ]
        places.setdefault((steps[rank], tuple(frames)), []).append(rank)
    lines = []
    for (step, inner), ranks in places.items():
        lines.append(f"{name_ranks(ranks)}, last at {step_name(step)}:")
        lines += [f"    {frame}" for frame in inner]
    return "\n".join(lines)


def name_ranks(ranks: Iterable[int]) -> str:
    """Name ranks in a sentence: `rank 3`, `ranks 0, 4`."""
    names = [str(rank) for rank in sorted(ranks)]
    return f"rank{'s' if len(names) > 1 else ''} {', '.join(names)}"


def step_name(step: int) -> str:
    """Name a heartbeat's step."""
    return "start-up" if step < 0 else f"step {step}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read_from(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as log:
            log.seek(offset)
            return log.read().decode("utf-8", "replace")
    except OSError:
        return ""
