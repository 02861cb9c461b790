"""Tests of notes on failed graph replays: the batch's eager result, and an explanation of poison values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftmark import Geometry, LoadedBackend
from draftmark.runtime import Arena, AttentionBackend, ForwardBatch
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.harness.poison import INDEX, NAN, poison_in
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome
from draftmark_reference import ReferencePlugin

REPLAY = "graphs.replay_equals_eager[small-decode]"
ITEM = next(item for item in all_items() if item.id == REPLAY)
Change = Callable[[Any], None]


def _message(change: Change) -> str:
    """Return the failure message of the reference backend after `change` has modified it."""

    class Changed(ReferencePlugin):
        def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
            backend = super().open_backend(geometry, arena)
            change(backend)
            return backend

    result = run_item(ITEM, BackendUnderTest(LoadedBackend("reference", Changed()), "cpu", Tier.HOST), [])
    assert result.outcome is Outcome.FAILED
    return result.message


def _writes_once(backend: Any) -> None:
    """Make write_metadata write only in the warm-up, so that the captured call writes nothing."""
    right, calls = backend.write_metadata, []

    def once(batch: ForwardBatch) -> None:
        calls.append(batch)
        if len(calls) == 1:
            right(batch)

    backend.write_metadata = once


def _zeros(backend: Any) -> None:
    backend.attend = lambda q, cache, batch, out: out.zero_()


def _raises_at_replay(backend: Any) -> None:
    """Make plan raise an error after the warm-up and the capture."""
    right, calls = backend.plan, []

    def plan(batch: ForwardBatch) -> None:
        calls.append(batch)
        if len(calls) > 6:
            raise IndexError("index 92 is out of bounds")
        right(batch)

    backend.plan = plan


def test_faulty_capture_is_right_eagerly() -> None:
    """If only the captured graph is wrong, the message reports a correct eager result and explains the poison."""
    message = _message(_writes_once)
    assert "  eagerly: right: the same batch in a fresh arena" in message
    assert f"  poison: {INDEX}" in message


def test_wrong_kernel_is_wrong_eagerly_too() -> None:
    """If the kernel is wrong, the message reports that eager mode is wrong too, so readers do not suspect the graph."""
    assert "  eagerly: wrong too: the output is wrong in (request, row)" in _message(_zeros)


def test_exception_in_replay_has_batch_and_note() -> None:
    """If a replay raises an exception, the message has the batch and reports that the eager result is correct."""
    message = _message(_raises_at_replay)
    assert "raised IndexError: index 92 is out of bounds" in message
    assert "  batch: decode-replay-" in message and "r0: L=" in message
    assert "  eagerly: right" in message


@pytest.mark.parametrize(
    ("got", "note"),
    [
        ([3, -1, -1], INDEX),
        ("missing [130], extra [-16, -15]", INDEX),
        ("nan at request 0, row 1", NAN),
        (-1, INDEX),
        ([0, 4, 9], ""),
        ("-0.25 at request 0", ""),
        ("rows 1-3", ""),
    ],
)
def test_poison_is_recognised(got: object, note: str) -> None:
    """A NaN or a negative index in a wrong value is explained as poison: memory that the step did not write."""
    assert poison_in(got) == note
