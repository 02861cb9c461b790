"""Checks of RAGGED_VERIFY and DRAFT_BLOCK, and of an engine's own KV slots, page tables and KV layouts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases.engine_forwards import (
    IN_1_5,
    SINCE,
    blocks,
    both_blocks,
    captures,
    forms,
    modules,
    of_the_device,
    stored_only,
    stored_only_captures,
)
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from .guards import assert_within_usage

if TYPE_CHECKING:
    from ..harness.harness import Harness


def _assert_forward(harness: Harness, forward: ForwardCase) -> None:
    """Run a forward with the least exact host lengths that suffice, and with exact ones."""
    for seed, host in enumerate(dict.fromkeys((harness.host, "exact"))):
        harness.assert_forward(forward, harness.load(forward, host, seed))


@behaviour(Fixture.FORWARD, cases=of_the_device, since=SINCE)
def rows_are_the_devices(harness: Harness, forward: ForwardCase) -> None:
    """In RAGGED_VERIFY the device sets the row counts; every live row is stored and its output is right.

    Padding rows after the last request store nothing, and their outputs are finite.
    """
    _assert_forward(harness, forward)


@behaviour(Fixture.FORWARD, cases=of_the_device, since=SINCE, bugs=("TRT-LLM#17026", "vllm#40383"))
def keep_to_what_usage_says(harness: Harness, forward: ForwardCase) -> None:
    """In RAGGED_VERIFY a forward writes no byte of a buffer after the bytes that usage() declares for its batch."""
    assert_within_usage(harness, forward)


@behaviour(Fixture.FORWARD, cases=blocks, since=SINCE)
def blocks_see_themselves(harness: Harness, forward: ForwardCase) -> None:
    """Each row of a draft block attends to its prefix and to the whole block, within the window.

    The block includes rows that come later than the row itself.
    """
    _assert_forward(harness, forward)


@behaviour(Fixture.FORWARD, cases=forms, since=SINCE)
def forms_are_taken_as_they_are(harness: Harness, forward: ForwardCase) -> None:
    """The backend accepts an engine's own KV slots, wider page tables and strided KV views, in every mode.

    Each row is stored at the slot that the engine gives. A slot of -1 means that the row is not stored. K and V may
    have different strides.
    """
    from ..harness.tensor_forms import TABLES, KVForm, TensorForm

    hosts = (harness.host, "exact")
    for seed, kv in enumerate((KVForm.BY_HEAD, KVForm.UNLIKE)):
        harness.tensors.take(TensorForm(TABLES[0], kv))
        harness.assert_forward(forward, harness.load(forward, hosts[seed], seed))


@behaviour(Fixture.FORWARDS, cases=captures, since=SINCE)
def graphs_follow_the_device(harness: Harness, rounds: list[ForwardCase]) -> None:
    """A graph captured for one batch gives right outputs for other batches of its size.

    The replayed batches have other row counts, lengths, pages and numbers of live requests.
    """
    from ..harness.graph_harness import GraphHarness

    graphs, (first, *others) = GraphHarness(harness), rounds
    key = key_of(first)
    graphs.record(key, graphs.load(first))
    for seed, other in enumerate(others, start=1):
        graphs.assert_replay(key.program, graphs.load(other, seed))


@behaviour(Fixture.FORWARDS, cases=both_blocks, since=IN_1_5)
def blocks_may_be_causal(harness: Harness, forwards: list[ForwardCase]) -> None:
    """In a draft block with a causal tail no row sees a later one. The backend's next block may have the other kind."""
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=stored_only, since=IN_1_5)
def rows_may_be_stored_only(harness: Harness, forwards: list[ForwardCase]) -> None:
    """An engine may call write_kv without attend, in any mode.

    The rows are stored, no output is written, and the next forwards are right.
    """
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=stored_only_captures, since=IN_1_5)
def rows_may_be_stored_only_in_a_graph(harness: Harness, rounds: list[ForwardCase]) -> None:
    """A graph may contain write_kv without attend; its replays store the rows of other batches."""
    from ..harness.graph_harness import GraphHarness

    GraphHarness(harness).assert_replays([*rounds, rounds[0]])


@behaviour(Fixture.FORWARD, cases=modules, since=IN_1_5)
def modules_read_their_newest_rows_again(harness: Harness, forward: ForwardCase) -> None:
    """With n MTP modules, DRAFT_EXTEND has D + n - 1 rows. The first of them may have slot -1."""
    _assert_forward(harness, forward)
