"""Raises an error at a chosen torch operator of a call, as a device without memory does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from ..cases.histories import CALLS, Failure


class Interruption(RuntimeError):
    """Error that the suite raises in the middle of a forward, in place of a device's error."""


class _Operators(TorchDispatchMode):
    """Dispatch mode that runs a number of operators, and raises `Interruption` at the next one."""

    def __init__(self, count: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left = count

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no code is compiled here, and dynamo's wrapper takes seconds to import."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._left -= 1
        if self._left < 0:
            raise Interruption(f"the suite interrupts {func}")
        return func(*args, **(kwargs or {}))


@contextmanager
def expect_interruption() -> Iterator[None]:
    """Leave the block at an `Interruption`. Another error of a call that was interrupted leaves it too."""
    try:
        yield
    except Exception as error:
        if not _is_interruption(error):
            raise


def _is_interruption(error: BaseException | None) -> bool:
    """Return True for an interruption, and for an error that a backend raised because of one."""
    return error is not None and (
        isinstance(error, Interruption) or _is_interruption(error.__cause__ or error.__context__)
    )


def run_until(failure: Failure, calls: Mapping[str, Callable[[], object]]) -> None:
    """Run the calls of a forward in order until the failure, and raise `Interruption` there.

    Args:
        calls: calls by their name in `CALLS`. A call that the forward does not make is absent.
    """
    for number, name in enumerate(CALLS):
        call = calls.get(name)
        if call is None:
            continue
        if number == failure.call and failure.operator is not None:
            with _Operators(failure.operator):
                call()
        else:
            call()
        if number >= failure.call:
            break
    raise Interruption(f"the suite ends the forward: it {failure}")
