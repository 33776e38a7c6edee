"""The pool of ranks, held against what a fresh group of processes would do."""

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import UserError
from meshwright.launch.environment import RankInfo
from tests.distributed.pool import RankPool


def sum_of_ranks(info: RankInfo, start: float) -> tuple[int, float, int, int]:
    total = torch.tensor([start + info.rank])
    dist.all_reduce(total)
    return info.rank, total.item(), dist.get_world_size(), torch.get_num_threads()


def process_id(info: RankInfo) -> int:
    return os.getpid()


def tensor_back(info: RankInfo, given: torch.Tensor) -> torch.Tensor:
    return given * info.rank


def raise_on(info: RankInfo, rank: int) -> None:
    print("about to fail")
    if info.rank == rank:
        raise UserError(f"rank {rank} was given nonsense")
    dist.barrier()


def die_on(info: RankInfo, rank: int) -> None:
    if info.rank == rank:
        os._exit(7)
    dist.barrier()


def leave_others_waiting(info: RankInfo) -> None:
    if info.rank == 1:
        sleep_for_long()
    dist.barrier()


def sleep_for_long() -> None:
    time.sleep(600)


def warn(info: RankInfo) -> None:
    import warnings

    warnings.warn("not allowed in tests", UserWarning, stacklevel=1)


def early_leaver(info: RankInfo) -> int:
    if info.rank == 0:
        return 0
    time.sleep(0.2)
    dist.distributed_c10d._get_default_store().set(f"late-{info.rank}", "1")
    return info.rank


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_each_case_has_a_group_of_its_own_size(pool: RankPool, world_size: int) -> None:
    expected = sum(range(world_size)) + 10.0 * world_size
    assert pool.run(world_size, sum_of_ranks, 10.0) == [
        (r, expected, world_size, 1) for r in range(world_size)
    ]


def test_ranks_serve_many_cases_quickly(pool: RankPool) -> None:
    first = pool.run(4, process_id)
    start_s = time.perf_counter()
    cases = [pool.run(4, process_id) for _ in range(5)]
    elapsed_s = time.perf_counter() - start_s
    assert all(case == first for case in cases)
    # A case costs 0.05 s on two cores; importing torch anew would cost more than 2 s in each. Generous, because
    # other work may run beside the tests.
    assert elapsed_s < 5


def test_tensors_travel_both_ways(pool: RankPool) -> None:
    given = torch.arange(6.0).reshape(2, 3)
    back = pool.run(3, tensor_back, given)
    assert all(torch.equal(back[rank], given * rank) for rank in range(3))


def test_pool_works_after_threads_ran_here(pool: RankPool) -> None:
    torch.set_num_threads(2)
    big = torch.ones(512, 512)
    assert (big @ big)[0, 0] == 512  # starts OpenMP's threads in this process
    assert pool.run(2, sum_of_ranks, 0.0)[0][1] == 1.0


def test_exception_is_raised_here_while_others_wait(pool: RankPool) -> None:
    start_s = time.perf_counter()
    with pytest.raises(UserError, match="rank 2 was given nonsense") as caught:
        pool.run(4, raise_on, 2)
    assert time.perf_counter() - start_s < 10  # not the limit of 60 s
    assert "in raise_on" in str(caught.value.__cause__)
    assert "about to fail" in str(caught.value.__cause__)
    assert pool.run(2, sum_of_ranks, 0.0)[1][1] == 1.0  # the pool serves on


def test_dead_rank_is_named(pool: RankPool) -> None:
    with pytest.raises(RuntimeError, match="rank 1 of 3 died: exit status 7"):
        pool.run(3, die_on, 1)
    assert pool.run(2, sum_of_ranks, 0.0)[1][1] == 1.0


def test_timeout_shows_every_stack(pool: RankPool) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1, 2\] of 3") as caught:
        pool.run(3, leave_others_waiting, timeout_s=1.0)
    text = str(caught.value)
    assert text.count("in sleep_for_long") == 1
    assert text.count("in barrier") == 2
    assert pool.run(2, sum_of_ranks, 0.0)[1][1] == 1.0


def test_warnings_in_a_rank_are_errors(pool: RankPool) -> None:
    with pytest.raises(UserWarning, match="not allowed in tests"):
        pool.run(1, warn)


def test_quick_rank_0_keeps_the_store_for_the_others(pool: RankPool) -> None:
    assert pool.run(3, early_leaver) == [0, 1, 2]


def test_what_cannot_be_sent_is_refused_before_anything_starts(pool: RankPool) -> None:
    def inner(info: RankInfo) -> Any:
        return None

    before = pool.run(2, process_id)
    with pytest.raises(AttributeError, match="inner"):
        pool.run(2, inner)
    with pytest.raises(ValueError, match=r"world_size 9 is not in 1\.\.8"):
        pool.run(9, process_id)
    assert pool.run(2, process_id) == before
