"""The watchdog of a rank under torchrun or srun, in a real process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import UserError
from meshwright.launch.control import RankControl
from meshwright.launch.watchdog import Watchdog
from tests.distributed.zygote import Zygote
from tests.launch import targets


def test_rank_stuck_in_a_step_ends_with_its_stack_in_the_log(zygote: Zygote, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank-0.log"
    (process,) = zygote.fork(1, [targets.__name__])
    process.start(targets.watched_hang, log)
    assert process.receive(30.0) == ("message", "now")
    with pytest.raises((EOFError, ConnectionResetError)):
        process.receive(30.0)
    assert process.end() == 1
    text = log.read_text()
    assert text.startswith("Timeout (0:00:00.5")
    assert "in lost_in_thought" in text


def test_interrupts_are_as_in_a_local_run(zygote: Zygote) -> None:
    (process,) = zygote.fork(1, [targets.__name__])
    process.start(targets.watched_until_stopped)
    for word in ("now", "stopping"):
        assert process.receive(30.0) == ("message", word)
        os.kill(process.pid, signal.SIGINT)
    assert process.result(30.0) == [False, True, True, True]
    assert "watching" in process.output()
    process.end()


def test_messages_go_to_the_callback_and_the_interface_is_the_trainers() -> None:
    got: list[tuple[int, dict[str, Any]]] = []
    with Watchdog(60.0, rank=3, on_message=lambda rank, message: got.append((rank, message))) as watchdog:
        control: RankControl = watchdog
        control.beat(1)
        control.say("hello")
        control.send({"kind": "progress", "step": 1})
        assert control.listen_fd is None
        assert not control.stop_requested
    assert got == [(3, {"kind": "say", "text": "hello"}), (3, {"kind": "progress", "step": 1})]


def test_unwritable_log_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file")
    with (
        pytest.raises(UserError, match=r"the log .*logs/rank-0\.log cannot be written"),
        Watchdog(1.0, tmp_path / "logs" / "rank-0.log"),
    ):
        pass
