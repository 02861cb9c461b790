"""Checks of recurrent state: rows continue their parents, commits keep paths, and no other slot changes.

Each forward is compared with the sequential oracle in float64: outputs, the slots that its rows write, and after its
commit the slots and checkpoints. Every other slot keeps its bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..behaviour import Fixture, behaviour
from ..cases import state
from ..cases import state_ranges as ranges
from ..cases import state_sets as cases
from ..cases.forwards import ForwardCase
from ..check import ContractViolation, Refused

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..cases.state_ranges import Optional, Sharded
    from ..cases.state_rounds import Round
    from ..harness.state_harness import StateHarness

SINCE = state.SINCE


@behaviour(
    Fixture.FORWARDS,
    cases=cases.trees,
    since=SINCE,
    bugs=("sglang#11133", "sglang#27463", "flashinfer#4151"),
)
def rows_follow_their_parents(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """Rows of chains, trees and forests are right for 1 to 64 rows a request.

    A row continues its parent's state, and its convolution reads its ancestors first, then the slot's window.
    """
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(
    Fixture.FORWARDS,
    cases=cases.paths,
    since=SINCE,
    bugs=("sglang#26351", "TRT-LLM#16759", "mlx-swift-lm#218", "xLLM#2247", "llama.cpp#26695", "vllm#56419"),
)
def commit_keeps_the_path(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """After a commit of any row, a slot stores the state and the window after the path to it; other slots keep theirs.

    A commit of no row changes nothing.
    """
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.verifies, since=SINCE, bugs=("llama.cpp#26695",))
def verify_leaves_the_slot(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A verify without a commit leaves no trace, whether it runs once or twice, and other forwards may follow it."""
    first, *others = forwards
    harness.load(first)
    for number, forward in enumerate((first, first, *others)):
        batch = harness.follow(forward, seed=number)
        harness.assert_forward(forward, batch, "the output of a verify that is not committed", commits=False)
    harness.assert_forward(first, harness.follow(first, seed=9), "the output after verifies without a commit")


@behaviour(
    Fixture.ROUNDS,
    cases=cases.any_rows,
    since=SINCE,
    bugs=("vllm#39273", "vllm#52942", "vllm#56419", "vllm#50021", "vllm-ascend#9956", "vllm#36917", "atlas#604"),
)
def rounds_of_any_rows(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """A round of any number of rows is right after a round with any number of accepted rows, decodes included."""
    harness.assert_rounds(rounds)


@behaviour(
    Fixture.ROUNDS, cases=cases.fresh, since=SINCE, bugs=("vllm#51483", "vllm#56524", "vllm#35219", "vllm-metal#488")
)
def no_prefix_is_zeros(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """A request without a prefix starts from zeros, whatever its slot holds: NaN, infinity or another request's state.

    Its first forward may be a prompt of any length, a decode or a verify.
    """
    harness.assert_rounds(rounds)


@behaviour(
    Fixture.ROUNDS,
    cases=cases.chunks,
    since=SINCE,
    bugs=("vllm#23279", "vllm#42430", "vllm#49918", "transformers#46741", "vllm#55178"),
)
def chunks_are_one_prefill(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """A prompt that is cut anywhere gives the rows and the state of one prefill; chunks may have one token."""
    harness.assert_rounds(rounds)


@behaviour(Fixture.ROUNDS, cases=cases.rounded, since=SINCE)
def only_prompts_round(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """If a layer lets prompts round operands to 16 bits, prompts stay within these roundings; other modes are exact."""
    harness.assert_rounds(rounds)


@behaviour(
    Fixture.FORWARDS,
    cases=cases.padded,
    since=SINCE,
    bugs=("TRT-LLM#13151", "tokenspeed#700", "vllm#49757", "sglang#30974", "flashinfer#2793", "vllm#36639"),
)
def padding_touches_no_slot(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """Padded requests, rows after a budget and stale entries reach no live row and no slot, also if they are NaN."""
    for number, forward in enumerate(forwards):
        for nan in (False, True):
            batch = harness.load(forward, seed=number)
            harness.finite_padding = not nan
            if nan:
                harness.spoil_padding(forward)
            harness.assert_forward(forward, batch)


@behaviour(
    Fixture.ROUNDS,
    cases=cases.checkpoints,
    since=SINCE,
    bugs=("vllm#53142", "vllm#57605", "vllm#53505", "sglang#31099", "sglang#27998", "vllm#41898"),
)
def checkpoint_is_its_length(harness: StateHarness, rounds: Sequence[Round]) -> None:
    """A round that reaches a multiple of the interval stores the state of exactly that length in the lent slot.

    Without a lent slot, or if no multiple is reached, nothing is stored.
    """
    harness.assert_rounds(rounds)
    harness.tensors.has_saves = False
    before_resumes = itertools.takewhile(lambda one: not one.copies, rounds[:4])
    harness.assert_rounds([one.without_saves() for one in before_resumes])


@behaviour(Fixture.FORWARDS, cases=ranges.crowds, since=SINCE)
def a_crowd_is_right(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A batch of 24 requests is right in every mode, with heads, states and convolutions of models."""
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.LARGE_POOL, cases=ranges.far, since=SINCE, bugs=("sglang#31934", "mamba#1015"))
def slots_reach_past_int32(harness: StateHarness, forward: ForwardCase) -> None:
    """States and windows are read and written at slots where slot · elements does not fit 32 bits."""
    harness.assert_forward(forward, harness.load(forward))


@behaviour(Fixture.SUBJECT, cases=ranges.dtypes, since=SINCE, bugs=("sglang#40419", "sglang#19785", "vllm#53239"))
def dtype_is_read_as_written(subject: BackendUnderTest, optional: Optional) -> None:
    """States and windows are stored in their own dtypes, and a forward rounds a state once, when it writes the slot.

    A backend may refuse a combination of dtypes; its reason then names one of them.
    """
    _served_or_named(subject, optional)


@behaviour(Fixture.SUBJECT, cases=ranges.drawn, since=SINCE)
def sizes_may_be_any(subject: BackendUnderTest, optional: Optional) -> None:
    """Outputs and slots are right for drawn heads, elements, taps, rows, requests and layers; each two ranges meet.

    A backend may refuse sizes; its reason then contains one of them.
    """
    _served_or_named(subject, optional)


def _served_or_named(subject: BackendUnderTest, optional: Optional) -> None:
    """Check the forwards, or that the backend's reason for refusing them contains one of the words."""
    from ..harness.state_harness import StateHarness

    try:
        harness = StateHarness(subject, optional.geometry, max(one.num_pages for one in optional.forwards))
    except Refused as refusal:
        if any(word in reason for reason in refusal.reasons for word in optional.words):
            return
        raise
    for number, forward in enumerate(optional.forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(
    Fixture.SUBJECT,
    cases=ranges.shards,
    since=SINCE,
    bugs=("vllm#13660", "vllm#55091", "mamba#916", "sglang#22060", "vllm#55208"),
)
def shards_are_the_whole(subject: BackendUnderTest, sharded: Sharded) -> None:
    """Outputs, states and windows of all ranks, side by side, are those of the whole layer.

    A rank has consecutive heads and key heads. The window's channels of q, k and v are sharded apart.
    """
    from ..harness.state_shards import assert_shards

    assert_shards(subject, sharded)


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE)
def inputs_may_be_strided(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """Inputs may be views of one projection with any pitch of rows, and layers may run in any order.

    A convolution may have weights of another dtype than the activations, and no bias.
    """
    for number, forward in enumerate(forwards):
        harness.tensors.set_strides(number)
        harness.reverses_layers = number % 2 == 1
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("llama.cpp#26695",))
def each_call_writes_its_own(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A call writes its outputs and, in EXTEND, DECODE and a commit, slots; never its inputs or the batch."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        watch = harness.watch(forward, batch)
        for name, call in harness.calls(forward, batch).items():
            call()
            watch.assert_unchanged_except(harness.writes_of(name, forward), name)


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("sglang#29413",))
def calls_read_no_device_memory(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """No call reads a tensor of the batch, the inputs, the slots or the arena on the host."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        for name, call in harness.calls(forward, batch).items():
            reads = harness.host_reads(forward, batch, call)
            if reads:
                raise ContractViolation(
                    f"{name}() reads device memory on the host",
                    batch=forward,
                    got=", ".join(reads),
                    expected="device work only; counts of rows lie in q_indptr, and paths in accept_index",
                    formula="draftmark.state.StateBackend",
                    bug="sglang#29413",
                )


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("sglang#27193",))
def plan_does_not_depend_on_device_memory(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A forward is right when its batch reaches the device after plan(), and nothing of an earlier plan is kept."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        harness.tensors.empty()
        harness.backend.plan(batch)
        batch = harness.load(forward, seed=number)
        expected = harness.expected(forward)
        harness.backend.write_metadata(batch)
        harness.layer(forward, batch)
        harness.assert_step(forward, batch, expected, "the output of a batch that reached the device after plan()")


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("sglang#27664",))
def nothing_is_kept_or_moved(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """Forwards of every mode leave the backend with the memory that it had when it was opened, and move no buffer."""
    harness.assert_keeps_nothing(forwards, "open_state", "state_buffers", "draftmark.state.StateBackend")


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("sglang#10278",))
def forwards_give_the_same_bits(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A forward gives the same bits of outputs and slots again after other forwards, and on another arena."""
    first = [harness.bits_of_round(forward, seed) for seed, forward in enumerate(forwards)]
    fresh = harness.fresh()
    for seed, forward in reversed([*enumerate(forwards)]):
        for runner, where in ((harness, "again, after other forwards"), (fresh, "on other memory")):
            again = runner.bits_of_round(forward, seed)
            differ = [name for name, bits in first[seed].items() if not bits.equal(again[name])]
            if differ:
                raise ContractViolation(
                    f"a forward gives other bits when it runs {where}",
                    batch=forward,
                    got=f"other bits of {', '.join(differ)}",
                    expected="the same bits for one device, one batch and equal contents",
                    formula="docs/contract.md, what may differ",
                    bug="sglang#10278",
                )


@behaviour(Fixture.FORWARDS, cases=ranges.strided, since=SINCE, bugs=("vllm#48261", "flashinfer#4014"))
def opens_are_apart(harness: StateHarness, forwards: list[ForwardCase]) -> None:
    """A round of one open between the rows of another open's round and its commit changes nothing there."""
    other = harness.fresh()
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        expected = harness.expected(forward)
        harness.prepare(batch)
        harness.rows(forward, batch)
        with_other = forwards[(number + 1) % len(forwards)]
        other.assert_forward(with_other, other.load(with_other, seed=number + 7))
        harness.commit(forward, batch)
        harness.assert_step(forward, batch, expected, "the output of a round with another open's round inside")
