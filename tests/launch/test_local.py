"""`run_local` with real processes, held against what the operating system says of them afterwards.

The launchers are forked from the clean process: pytest's own may have run torch threads.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.zygote import Forked, Zygote
from tests.launch import targets

_MODULES = ("torch", "torch.distributed", "meshwright.launch.process_group", targets.__name__)


class Launch:
    """A launcher in a process of its own, and what its ranks told it."""

    def __init__(self, process: Forked) -> None:
        self.process = process
        self.messages: list[tuple[int, dict[str, Any]]] = []

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, kind: str, count: int) -> list[dict[str, Any]]:
        """Wait until `count` messages of a kind have come."""
        while len(found := self.of_kind(kind)) < count:
            what, value = self.process.receive(60.0)
            assert what == "message", (what, value)
            self.messages.append(value)
        return found

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [message for _, message in self.messages if message["kind"] == kind]

    def end(self) -> dict[str, Any]:
        """Wait for the end of `run_local`; no process and no descriptor may be left on any path."""
        while True:
            what, value = self.process.receive(60.0)
            if what != "message":
                break
            self.messages.append(value)
        assert what == "result", value.trace
        assert value["children"] == []
        end: dict[str, Any] = value
        return end


@pytest.fixture
def start(zygote: Zygote, tmp_path: Path) -> Iterator[Any]:
    running: list[Forked] = []

    def start(target: str, world_size: int, **options: Any) -> Launch:
        (process,) = zygote.fork(1, _MODULES)
        running.append(process)
        process.start(targets.launch, target, world_size, tmp_path / "logs", options)
        return Launch(process)

    yield start
    for process in running:
        process.end()


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no zombie (one whose launcher was killed waits for init to reap it)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def all_gone(pids: list[int], within_s: float = 5.0) -> bool:
    deadline_s = time.monotonic() + within_s
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not any(is_alive(pid) for pid in pids)


def test_ranks_meet_speak_and_leave_logs(start: Any, tmp_path: Path) -> None:
    launch = start("sum_up", 4, threads_per_rank=1)
    assert launch.end()["ending"] == "finished"
    summaries = {rank: message for rank, message in launch.messages if message["kind"] == "summary"}
    for rank in range(4):
        env = summaries[rank]["env"]
        assert env[:5] == [str(rank), "4", str(rank), "4", "127.0.0.1"]
        assert env[5] == summaries[0]["env"][5]
        assert env[6] == "lo"
        assert summaries[rank]["threads"] == 1
        log = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
        assert f"rank {rank} got 6.0" in log
        assert "from a child of the rank" in log  # the descriptor is redirected, not only Python's stream
    assert sorted(m["text"] for m in launch.of_kind("say")) == [f"rank {rank} is done" for rank in range(4)]


def test_threads_are_the_cores_dealt_out(start: Any) -> None:
    cores = len(os.sched_getaffinity(0))
    launch = start("sum_up", 2)
    assert launch.end()["ending"] == "finished"
    assert [m["threads"] for m in launch.of_kind("summary")] == [max(1, cores // 2)] * 2


def test_eight_ranks_are_ready_at_once(start: Any) -> None:
    launch = start("join_only", 8)
    end = launch.end()
    assert end["ending"] == "finished"
    ready_s = max(message["at_s"] for message in launch.of_kind("ready")) - end["start_s"]
    # 0.07 s measured on two idle cores; one import of torch alone is above 1.3 s, and eight are above 5 s. The limit
    # leaves room for a busy machine and still fails if any rank imported torch anew.
    assert ready_s < 3.0


def test_long_messages_arrive_whole_and_in_order(start: Any) -> None:
    launch = start("long_messages", 2)
    assert launch.end()["ending"] == "finished"
    for rank in range(2):
        got = [message for sender, message in launch.messages if sender == rank]
        assert [message["number"] for message in got] == list(range(50))
        assert all(message["text"] == "é" * 50_000 for message in got)


@pytest.mark.parametrize(
    ("target", "world_size", "ending"),
    [
        ("user_error_on_1", 3, r"UserError: optimizer\.lr is -1; a number above 0 would be right"),
        (
            "exception_on_2",
            4,
            r"RunFailed: rank 2 of 4 failed: ValueError: layer 7 has no weight \(log: .*rank-2\.log\)",
        ),
        ("run_failed_on_1", 2, r"RunFailed: rank 1 of 2: the loss at step 5 is not a number \(log: .*\)"),
        ("slow_culprit", 3, r"RunFailed: rank 1 of 3 failed: KeyError: 'bias' \(log: .*\)"),
        (
            "killed_1",
            4,
            r"RunFailed: rank 1 of 4 was killed \(SIGKILL\), perhaps by the kernel for lack of memory \(.*\)",
        ),
        ("crash_1", 2, r"RunFailed: rank 1 of 2 was ended by SIGSEGV \(log: .*\)"),
        ("exit_7_on_0", 3, r"RunFailed: rank 0 of 3 ended with exit status 7 \(log: .*\)"),
        ("sys_exit_3_on_0", 2, r"RunFailed: rank 0 of 2 ended with exit status 3 \(log: .*\)"),
        (
            "silent_exit_0_on_1",
            2,
            r"RunFailed: rank 1 of 2 ended before its work was done, with exit status 0 \(.*\)",
        ),
        ("sys_exit_0", 2, r"finished"),
        ("nothing", 1, r"finished"),
    ],
)
def test_first_failure_is_told(start: Any, target: str, world_size: int, ending: str) -> None:
    end = start(target, world_size).end()
    assert re.fullmatch(ending, end["ending"]), end["ending"]
    # Far below the 60 s that a collective would wait for the dead rank.
    assert end["elapsed_s"] < 15


def test_traceback_is_in_the_log_of_the_rank(start: Any, tmp_path: Path) -> None:
    start("exception_on_2", 3).end()
    assert "in exception_on_2" in (tmp_path / "logs" / "rank-2.log").read_text()


def test_crash_leaves_the_stack_in_the_log(start: Any, tmp_path: Path) -> None:
    start("crash_1", 2).end()
    log = (tmp_path / "logs" / "rank-1.log").read_text()
    assert "Fatal Python error: Segmentation fault" in log
    assert "in crash_1" in log


def test_failure_without_culprit_shows_where_the_others_stood(start: Any) -> None:
    end = start("only_consequences", 3).end()
    assert "rank 0 of 3 failed: RuntimeError: [gloo" in end["ending"]
    assert "ranks 1, 2, last at start-up:\n    only_consequences" in end["notices"][0]


def test_stubborn_ranks_and_what_they_started_are_killed(start: Any) -> None:
    launch = start("stubborn_others", 2)
    (message,) = launch.wait_for("pids", 1)
    assert "ValueError: enough" in launch.end()["ending"]
    assert all_gone(message["pids"])


def test_hang_is_told_with_the_stack_of_every_rank(start: Any, tmp_path: Path) -> None:
    launch = start("hang_on_1", 3, hang_timeout_s=1.0)
    end = launch.end()
    assert end["ending"].startswith(
        "RunFailed: the run hangs, with no sign of life for 1 s: ranks 0, 1, 2 last at step 3"
    )
    (shown,) = end["notices"]
    assert "rank 1, last at step 3:\n    lost_in_thought" in shown
    assert "ranks 0, 2, last at step 3:\n" in shown
    assert "wait_in_collective" in shown
    stacks = (tmp_path / "logs" / "hang-stacks.txt").read_text()
    assert re.findall(r"^== rank (\d), last at step 3$", stacks, re.MULTILINE) == ["0", "1", "2"]
    assert stacks.count("in wait_in_collective") == 2
    assert stacks.count("in lost_in_thought") == 1
    assert "in lost_in_thought" in (tmp_path / "logs" / "rank-1.log").read_text()


def test_start_up_has_a_limit_of_its_own(start: Any) -> None:
    end = start("hang_before_first_step", 2, hang_timeout_s=0.1, start_timeout_s=1.0).end()
    assert "no sign of life for 1 s: ranks 0, 1 last at start-up" in end["ending"]
    assert end["elapsed_s"] >= 1.0


def test_rank_that_cannot_answer_is_told_so(start: Any) -> None:
    end = start("stopped_1", 2, hang_timeout_s=0.5).end()
    assert "rank 1, last at step 0:\n    no answer" in end["notices"][0]
    assert "the run hangs" in end["ending"]


def test_first_interrupt_ends_the_run_at_a_step(start: Any) -> None:
    launch = start("train_until_stopped", 3)
    launch.wait_for("running", 3)
    os.kill(launch.pid, signal.SIGINT)
    end = launch.end()
    assert end["ending"] == "finished"
    assert len({message["step"] for message in launch.of_kind("stopped")}) == 1
    assert end["notices"] == ["stopping at the end of this step; press Ctrl-C again to end at once"]


def test_second_interrupt_kills(start: Any) -> None:
    launch = start("deaf_to_stop", 2)
    pids = [message["pid"] for message in launch.wait_for("running", 2)]
    os.kill(launch.pid, signal.SIGINT)
    time.sleep(0.3)
    assert all(is_alive(pid) for pid in pids)
    os.kill(launch.pid, signal.SIGINT)
    assert launch.end()["ending"] == "KeyboardInterrupt: "
    assert all_gone(pids)


def test_killed_launcher_leaves_no_orphans(start: Any) -> None:
    launch = start("train_until_stopped", 3)
    pids = [message["pid"] for message in launch.wait_for("running", 3)]
    assert all(is_alive(pid) for pid in pids)
    os.kill(launch.pid, signal.SIGKILL)
    assert all_gone(pids)


@pytest.mark.parametrize("target", ["sum_up", "exception_on_2", "hang_before_first_step"])
def test_no_descriptor_is_left(zygote: Zygote, tmp_path: Path, target: str) -> None:
    (process,) = zygote.fork(1, _MODULES)
    counts = []
    for _ in range(2):
        # The first run may open what stays open for good (a library's descriptor); a second may not add to it.
        process.start(targets.launch, target, 3, tmp_path, {"start_timeout_s": 1.0})
        counts.append(len(Launch(process).end()["open_fds"]))
    process.end()
    assert counts[0] == counts[1]


def test_logs_of_a_second_run_follow_the_first(start: Any, tmp_path: Path) -> None:
    for _ in range(2):
        start("sum_up", 1).end()
    assert (tmp_path / "logs" / "rank-0.log").read_text().count("rank 0 got 0.0") == 2


def test_unwritable_log_folder_is_the_users_to_mend(start: Any, tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file stands where the folder should be")
    end = start("nothing", 1).end()
    assert (
        end["ending"] == f"UserError: the ranks' logs cannot be written to {tmp_path / 'logs'}: File exists"
    )


def test_a_run_has_at_least_one_rank(start: Any) -> None:
    assert (
        start("nothing", 0).end()["ending"]
        == "UserError: a run of 0 ranks is not possible: at least 1 is needed"
    )
