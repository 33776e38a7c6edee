"""What this host can hold, held against psutil and against the files of a cgroup as the kernel writes them."""

from pathlib import Path

import psutil
import pytest

from meshwright.errors import UserError
from meshwright.launch import capacity

GIB = 2**30


def test_ranks_that_fit_are_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "memory_available_bytes", lambda: 8 * GIB)
    capacity.check_host_capacity(8, GIB)


@pytest.mark.parametrize(
    ("world_size", "gib_per_rank", "sentence"),
    [
        (
            9,
            1,
            "9 ranks need about 9.0 GiB of memory (1.00 GiB each) and this host has 8.0 GiB available: at most 8",
        ),
        (
            1,
            9,
            "1 ranks need about 9.0 GiB of memory (9.00 GiB each) and this host has 8.0 GiB available: not one",
        ),
    ],
)
def test_too_much_memory(
    monkeypatch: pytest.MonkeyPatch, world_size: int, gib_per_rank: int, sentence: str
) -> None:
    monkeypatch.setattr(capacity, "memory_available_bytes", lambda: 8 * GIB)
    with pytest.raises(UserError) as caught:
        capacity.check_host_capacity(world_size, gib_per_rank * GIB)
    assert str(caught.value).startswith(sentence)


def test_too_many_ranks_for_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "cores_available", lambda: 2)
    capacity.check_host_capacity(128, 1)
    with pytest.raises(UserError, match="129 ranks are too many for the 2 cores of this host: at most 128"):
        capacity.check_host_capacity(129, 1)


def test_available_memory_is_no_more_than_the_hosts() -> None:
    assert 0 < capacity.memory_available_bytes() <= psutil.virtual_memory().total


def write_group(directory: Path, limit: str, used: int, inactive_file: int) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{used}\n")
    (directory / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


def test_tightest_cgroup_counts(tmp_path: Path) -> None:
    (tmp_path / "membership").write_text("0::/job/step\n")
    write_group(
        tmp_path / "root" / "job", str(4 * GIB), 3 * GIB, GIB
    )  # 2 GiB left, old file pages not counted
    write_group(tmp_path / "root" / "job" / "step", "max", 3 * GIB, 0)
    assert capacity._cgroup_left_bytes(tmp_path / "root", tmp_path / "membership") == 2 * GIB


def test_no_cgroup_no_limit(tmp_path: Path) -> None:
    assert capacity._cgroup_left_bytes(tmp_path, tmp_path / "missing") is None
    (tmp_path / "membership").write_text("4:memory:/old\n")
    assert capacity._cgroup_left_bytes(tmp_path, tmp_path / "membership") is None
