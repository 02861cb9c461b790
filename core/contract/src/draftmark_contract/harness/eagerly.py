"""Adds a note to the error of a failed capture or replay: it states whether the batch is right when run eagerly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..cases.forwards import ForwardCase
from ..check import ContractViolation

if TYPE_CHECKING:
    from .harness import Harness

NOTE = "eagerly"
RIGHT = "right: the same batch in a fresh arena; the fault is in what a capture keeps or a replay reads"
Method = TypeVar("Method", bound=Callable[..., Any])


def notes_eager_result(method: Method) -> Method:
    """Wrap a method of `GraphHarness` that takes a `Loaded` round, so that errors get a note with the eager result."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **named: Any) -> Any:
        try:
            return method(self, *args, **named)
        # Any exception gets the note: a ContractViolation, or an error that the plugin raised.
        except Exception as error:
            if not any(note.startswith(NOTE) for note in getattr(error, "__notes__", ())):
                loaded = next(one for one in (*args, *named.values()) if hasattr(one, "forwards"))
                error.add_note(f"{NOTE}: {eager_run(self.harness, loaded.forwards)}")
            raise

    return cast(Method, run)


def eager_run(harness: Harness, forwards: Iterable[ForwardCase]) -> str:
    """Open the backend anew, run the forwards on it one after another, and return the result as text."""
    current = harness.subject.current
    try:
        fresh = harness.fresh()
        for forward in forwards:
            fresh.assert_forward(forward, fresh.load(forward))
    except ContractViolation as wrong:
        return f"wrong too: {wrong.what}"
    except Exception as error:  # The plugin can raise any exception here, and a lost device can too.
        return f"raises too: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
    finally:
        harness.subject.current = current
    return RIGHT
