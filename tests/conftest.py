"""Fixtures of all tests: the pool of ranks, and the clean process it is forked from."""

from collections.abc import Iterator

import pytest

from tests.distributed.pool import RankPool
from tests.distributed.zygote import Zygote

_ZYGOTE = pytest.StashKey[Zygote]()


def pytest_configure(config: pytest.Config) -> None:
    # Here, not in a fixture: it has to be forked before any test module runs a torch operation.
    config.stash[_ZYGOTE] = Zygote()


def pytest_unconfigure(config: pytest.Config) -> None:
    zygote = config.stash.get(_ZYGOTE, None)
    if zygote is not None:
        zygote.close()


@pytest.fixture(scope="session")
def zygote(pytestconfig: pytest.Config) -> Zygote:
    return pytestconfig.stash[_ZYGOTE]


@pytest.fixture(scope="session")
def pool(zygote: Zygote) -> Iterator[RankPool]:
    """Eight ranks to run cases on: `pool.run(world_size, fn, *args) -> one result per rank`."""
    ranks = RankPool(zygote)
    yield ranks
    ranks.close()
