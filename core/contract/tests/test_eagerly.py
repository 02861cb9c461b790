"""A failed replay says how its batch ends eagerly, and what poison in a value means."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from draftmark import Geometry, LoadedBackend
from draftmark.reference import ReferencePlugin
from draftmark.runtime import Arena, AttentionBackend, ForwardBatch
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.harness.poison import INDEX, NAN, poison_in
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome

REPLAY = "graphs.replay_equals_eager[small-decode]"
ITEM = next(item for item in all_items() if item.id == REPLAY)
Change = Callable[[Any], None]


def _message(change: Change) -> str:
    """What the item says of the reference with an opened backend changed in place."""

    class Changed(ReferencePlugin):
        def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
            backend = super().open_backend(geometry, arena)
            change(backend)
            return backend

    result = run_item(ITEM, BackendUnderTest(LoadedBackend("reference", Changed()), "cpu", Tier.HOST), [])
    assert result.outcome is Outcome.FAILED
    return result.message


def _writes_once(backend: Any) -> None:
    """write_metadata works the first time alone: the warm-up's; what is captured writes nothing."""
    right, calls = backend.write_metadata, []

    def once(batch: ForwardBatch) -> None:
        calls.append(batch)
        if len(calls) == 1:
            right(batch)

    backend.write_metadata = once


def _zeros(backend: Any) -> None:
    backend.attend = lambda q, cache, batch, out: out.zero_()


def _raises_at_replay(backend: Any) -> None:
    """plan raises from the third call on: warm-up and capture have passed."""
    right, calls = backend.plan, []

    def plan(batch: ForwardBatch) -> None:
        calls.append(batch)
        if len(calls) > 6:
            raise IndexError("index 92 is out of bounds")
        right(batch)

    backend.plan = plan


def test_a_capture_at_fault_is_told_from_a_wrong_kernel() -> None:
    """The same batch is right eagerly in a fresh arena, and the poison in it is explained."""
    message = _message(_writes_once)
    assert "  eagerly: right: the same batch in a fresh arena" in message
    assert f"  poison: {INDEX}" in message


def test_a_wrong_kernel_is_wrong_eagerly_too() -> None:
    """Then the graph is not to blame."""
    assert "  eagerly: wrong too: the output is wrong in (request, row)" in _message(_zeros)


def test_what_a_plugin_raises_in_a_replay_has_batch_and_note() -> None:
    """A bare exception keeps the batch, and says that the batch is right eagerly."""
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
    """By a value that nobody can have meant: NaN, or a negative index."""
    assert poison_in(got) == note
