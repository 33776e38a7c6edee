"""Whose fault it was, held against what gloo, NCCL and the store say when a peer is gone."""

import pytest

from meshwright.errors import RunFailed, UserError
from meshwright.launch.failures import (
    Failure,
    culprit,
    describe_exception,
    failure_from_exception,
    failure_from_exit,
    is_communication_error,
    to_exception,
)


class DistError(RuntimeError):
    """Stands for torch.distributed.DistError, which is told by its name."""


class DistBackendError(DistError):
    pass


def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_communication"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:525] Connection closed by peer [127.0.0.1]:3"), True),
        (RuntimeError("Connection reset by peer"), True),
        (DistBackendError("anything"), True),
        (raised_from(ValueError("step 3 failed"), RuntimeError("NCCL communicator was aborted")), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"), False),
        (ValueError("the file has a broken pipe in its name"), False),
        (BrokenPipeError("a data loader's own pipe"), False),
    ],
)
def test_communication_errors(error: Exception, is_communication: bool) -> None:
    assert is_communication_error(error) == is_communication


def test_real_torch_errors_are_known_by_their_family() -> None:
    import torch.distributed as dist

    assert issubclass(dist.DistNetworkError, dist.DistError)
    assert is_communication_error(dist.DistNetworkError("the server socket has failed"))


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        ([Failure(0, 2.0, "b"), Failure(1, 1.0, "a")], 1),
        ([Failure(0, 1.0, "lost its peer", is_consequence=True), Failure(3, 1.5, "died")], 3),
        ([Failure(0, 2.0, "", is_consequence=True), Failure(2, 1.0, "", is_consequence=True)], 2),
    ],
)
def test_culprit(failures: list[Failure], rank: int) -> None:
    assert culprit(failures).rank == rank


def told(error: Exception) -> str:
    failure = failure_from_exception(3, describe_exception(error, 0.0))
    shown = to_exception(failure, 8, "logs/rank-3.log")
    return f"{type(shown).__name__}: {shown}"


def test_how_an_end_is_told() -> None:
    assert told(UserError("lr is -1")) == "UserError: lr is -1"
    assert told(RunFailed("was worse than before")) == (
        "RunFailed: rank 3 of 8: was worse than before (log: logs/rank-3.log)"
    )
    assert told(KeyError()) == "RunFailed: rank 3 of 8 failed: KeyError (log: logs/rank-3.log)"
    shown = to_exception(failure_from_exit(3, 0.0, -40), 8, "x.log")
    assert str(shown) == "rank 3 of 8 was ended by signal 40 (log: x.log)"
