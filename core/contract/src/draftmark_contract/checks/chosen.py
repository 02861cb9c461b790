"""Checks of layers with chosen keys: each query row attends to the keys of its own list, and to no other key."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..behaviour import Fixture, behaviour, on_device_only
from ..cases import chosen as cases
from ..cases import latent_formats as formats
from ..cases.contents import Contents
from ..cases.forwards import ForwardCase
from ..cases.graph_rounds import key_of
from ..check import ContractViolation, Tier, check
from ..sizing.batches import brief
from .latent_lse import assert_lse
from .production import assert_forward, assert_served_or_named
from .random_history import assert_histories
from .sizing import assert_covered
from .tightness import index_buffers, own_buffers

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest
    from ..cases.latent import Special
    from ..harness.harness import Harness

SINCE = cases.SINCE


@behaviour(Fixture.FORWARDS, cases=cases.each_mode, since=SINCE, bugs=("vllm#47238", "vllm#42810"))
def rows_see_their_lists(harness: Harness, forwards: list[ForwardCase]) -> None:
    """In every mode a row attends to the keys of its list, in any order, and stores its own key and value.

    Lists are full, of one key, empty, or have -1 anywhere. Entries after a count hold numbers of no pool, or slots of
    NaN.
    """
    for number, forward in enumerate(forwards):
        contents = Contents.NEEDLES if number % 3 == 2 else Contents.USUAL
        harness.assert_forward(forward, harness.load(forward, contents=contents, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.every_kind, since=SINCE, bugs=("vllm#55563",))
def lists_may_have_any_length(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Lists of 0 keys, of 1, and of chosen_width keys are right next to each other, for widths from 1 to 256.

    A row without keys has output 0, and log-sum-exp -inf if the backend returns it.
    """
    for number, forward in enumerate(forwards):
        harness.arena.poison()
        if harness.subject.backend.info.lse:
            assert_lse(harness, forward, Contents.USUAL, number)
        else:
            harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.some_modes, since=SINCE, bugs=("vllm#43961",))
def other_keys_reach_no_output(harness: Harness, forwards: list[ForwardCase]) -> None:
    """NaN and infinity in every KV slot that no list names reach no output, although rows could see these keys."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        _fill_unlisted(harness, forward, float(("nan", "inf", "-inf")[number % 3]))
        harness.assert_forward(forward, batch, "with NaN or infinity in keys outside of all lists the output")


def _fill_unlisted(harness: Harness, forward: ForwardCase, value: float) -> None:
    """Fill every row of the pool that no live row's list names, except null pages."""
    import torch

    from ..harness.pools import raw

    size, tensors = forward.geometry.attention.page_size, harness.tensors
    live = forward.rows[: forward.live_rows]
    kept = {slot for row in live for slot in forward.truth.visible[row]} | set(range(forward.null_pages * size))
    other = torch.ones(tensors.num_pages * size, dtype=torch.bool, device=tensors.q.device)
    other[torch.tensor(sorted(kept), device=other.device)] = False
    for pool in tensors.stored.values():
        if math.isnan(value):
            raw(pool)[other.view(pool.shape[:2])] = -1  # All bits set is NaN in every dtype, also in parts of a row.
        else:
            pool[other.view(pool.shape[:2])] = value


@behaviour(Fixture.FORWARDS, cases=cases.some_modes, since=SINCE, bugs=("ATOM#1362",))
def lists_belong_to_the_next_layer(harness: Harness, forwards: list[ForwardCase]) -> None:
    """The engine rewrites the lists before each layer's attend, after one write_metadata, which reads no list."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        harness.tensors.dirty_lists(forward)
        harness.prepare(batch)
        for layer in range(3):
            one = replace(forward, draw=forward.draw + layer)
            harness.tensors.fill_lists(one)
            harness.tensors.clear()
            expected = harness.expected(one)
            harness.layer(one, batch)
            harness.assert_step(one, batch, expected, f"layer {layer + 1} of a forward, with lists of its own,")


@behaviour(Fixture.FORWARDS, cases=cases.trees, since=SINCE)
def a_tree_is_a_list(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A row of a tree with a list of its prefix and ancestors gets its output without lists, on pages of any size.

    The tail's mask is not applied to a list.
    """
    for number, forward in enumerate(forwards):
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.padded, since=SINCE, bugs=("vllm#42810", "vllm#57432"))
def padding_may_be_most(harness: Harness, forwards: list[ForwardCase]) -> None:
    """A batch of 18 requests is right when one is live, and lists of padding rows are empty, null slots or stale."""
    for number, forward in enumerate(forwards):
        harness.arena.poison()
        harness.assert_forward(forward, harness.load(forward, seed=number))


@behaviour(Fixture.FORWARDS, cases=cases.forms, since=SINCE)
def engine_forms_may_have_lists(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Lists name KV slots of the pool whether the engine stores KV itself, places its rows, or strides its pages."""
    for number, forward in enumerate(forwards):
        batch = harness.load(forward, seed=number)
        watch = harness.watch(forward, batch)
        harness.assert_forward(forward, batch)
        written = [] if not forward.is_stored else [f"cache.{name}" for name in harness.tensors.stored]
        watch.assert_unchanged_except(("out", *written), "a forward")


@behaviour(Fixture.FORWARDS, cases=formats.lists, since=SINCE)
def lists_name_rows_of_656_bytes(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Listed rows of 656 bytes, with a scale for each 128 e4m3 numbers, are read exactly in every mode.

    NaN in the rows that no list names reaches no output.
    """
    for number, forward in enumerate(forwards):
        contents = Contents.NEEDLES if number % 3 == 2 else Contents.USUAL
        batch = harness.load(forward, contents=contents, seed=number)
        if number % 2:
            _fill_unlisted(harness, forward, float("nan"))
        harness.assert_forward(forward, batch)


@behaviour(Fixture.SUBJECT, cases=cases.special, since=SINCE)
def features_are_served_or_refused(subject: BackendUnderTest, special: Special) -> None:
    """A backend that serves chosen keys serves a cap, sinks, 8 bits, two buffers or K and V apart too, or names it.

    A reason of its refusal contains the feature's name. A served feature gives right outputs.
    """
    subject.require(cases.claim()[0].value)
    assert_served_or_named(subject, special, "chosen keys are")


@behaviour(Fixture.FORWARDS, cases=cases.wide, since=SINCE, bugs=("vllm#55563", "vllm#34552"))
def wide_lists_are_right(harness: Harness, forwards: list[ForwardCase]) -> None:
    """Outputs are right for lists of 2,048 keys, the width of models, over requests of more keys, in every mode."""
    for forward in forwards:
        assert_forward(harness, forward, Contents.WEIGHED)


@behaviour(Fixture.FORWARDS, cases=cases.graphs, since=SINCE, bugs=("vllm#34552", "sglang#28028", "vllm#42810"))
def replays_read_other_lists(harness: Harness, rounds: list[ForwardCase]) -> None:
    """Graphs captured on one batch's lists are right for other lists, lengths and rows, replay after replay."""
    from ..harness.graph_harness import GraphHarness

    graphs = GraphHarness(harness)
    for number, forward in enumerate(rounds):
        key = key_of(forward)
        if key not in graphs.forms:
            graphs.record(key, graphs.load(forward, host="unknown" if harness.bounded else "exact"))
        else:
            graphs.assert_replay(key.program, graphs.load_replay(forward, number, poison=number % 2 == 0))


@behaviour(Fixture.SUBJECT, cases=cases.histories, since=SINCE, bugs=("sglang#31198",))
def histories_equal_the_oracle(subject: BackendUnderTest, value: tuple[Geometry, int]) -> None:
    """Random sequences of forwards, captures and replays over lists match the oracle on one open, as without lists."""
    assert_histories(subject, *value)


@behaviour(Fixture.LARGE_POOL, cases=cases.far, since=SINCE, bugs=("vllm#47671", "flashinfer#3136"))
def slots_may_lie_past_int32(harness: Harness, forward: ForwardCase) -> None:
    """Listed rows are read where slot · head_dim does not fit 32 bits."""
    harness.run(forward, harness.load(forward))
    harness.assert_sparse_pool(forward)


@on_device_only(Fixture.FORWARD, cases=cases.full_size, since=SINCE)
def full_size_is_right_on_device(harness: Harness, forward: ForwardCase) -> None:
    """Outputs are right on the device for 33 requests with lists of 2,048 keys in the head counts of models."""
    assert_forward(harness, forward, Contents.WEIGHED, Contents.NEEDLES)


@check(tier=Tier.SIZING, cases=cases.sizing, since=SINCE, bugs=("vllm#34552", "vllm#42810"))
def buffers_cover_every_list(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every declared extent is large enough for the lists of all rows, and no buffer is larger than they need."""
    subject.require(geometry)
    assert_covered(subject, subject.fit(geometry), quick=True)
    if geometry.max_reqs > 1:
        index_buffers(subject, geometry)
        own_buffers(subject, geometry)


@check(tier=Tier.SIZING, cases=cases.claim, since=SINCE)
def claims_are_served(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A backend that claims BackendInfo.chosen_keys serves latent rows with lists in some shape on some device."""
    from ..sizing.latent import ways_to_serve

    every = ways_to_serve(geometry, subject.profile)
    lists = (replace(one, attention=replace(one.attention, chosen_width=cases.PRODUCTION)) for one in every)
    if not subject.backend.info.chosen_keys:
        subject.require(geometry)
    if all(subject.backend.supports(one) for one in lists):
        raise ContractViolation(
            "chosen keys that BackendInfo claims are refused for every shape that the suite has",
            batch=brief(geometry),
            got=subject.backend.supports(subject.fit(geometry)),
            expected="some geometry with lists is served, on this device or another one",
            formula="BackendInfo.chosen_keys",
            remedy="claim only what is served: engines plan by these claims",
        )
