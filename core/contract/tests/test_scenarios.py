"""Tests of the contract's cases: they cover edges and avoid special values that would hide bugs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from draftmark import CORE_MODES, Geometry, Mode
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.cases.forwards import ForwardCase
from draftmark_contract.cases.geometries import EVERYWHERE, LARGE_PAGES, behaviours
from draftmark_contract.cases.graph_rounds import programs_of, replays
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import all_items

DRAWN = ("batch_invariance", "black_box", "process", "sizes")
"""Modules of checks that draw geometries of their own, so that a case's name is no common shape."""
TURNS = [forward for geometry in behaviours().values() for forward in all_forwards(geometry)]


def test_no_equality_hides_a_factor() -> None:
    """Cases avoid equal sizes that would hide a wrong factor, for example num_draft_tokens = num_steps + 1."""
    trees = [g for g in behaviours().values() if g.draft.topk > 1]
    assert len(trees) > 5
    for geometry in trees:
        assert geometry.draft.num_draft_tokens != geometry.draft.num_steps + 1
        assert geometry.max_pages_per_req * geometry.attention.page_size > geometry.limits.max_context_len
        assert geometry.limits.max_num_reqs not in geometry.limits.capture_batch_sizes
    assert {g.attention.page_size for g in trees} >= {1, 8, 16, 32, 128}


def test_large_pages_are_crossed_by_trees() -> None:
    """With pages of 128, some prefixes cross a page boundary. Some tails cross one in every mode except DECODE."""
    size = 128
    for name in LARGE_PAGES:
        geometry = behaviours()[name]
        forwards = [forward for forward in all_forwards(geometry) if forward.mode is not Mode.DECODE]
        assert geometry.attention.page_size == geometry.attention.head_dim == size
        for mode, step in {(forward.mode, forward.step) for forward in forwards}:
            live = [
                r
                for forward in forwards
                if (forward.mode, forward.step) == (mode, step)
                for r in forward.requests
                if r.live
            ]
            assert any(one.prefix > size for one in live)
            assert any(one.prefix % size and one.prefix // size < (one.prefix + one.tail - 1) // size for one in live)


def test_every_check_covers_the_common_shapes() -> None:
    """If a check has a case on one common shape, it has cases on all common shapes."""
    names: dict[str, Counter[str]] = {}
    for item in all_items((Tier.HOST,)):
        found = [name for name in EVERYWHERE if item.case.id == name or item.case.id.startswith(f"{name}-")]
        if found:
            names.setdefault(item.check.name, Counter()).update(found)
    of_pairs = {"guards.keep_target_and_draft_apart"}
    of_odd = {"supports.opens_what_it_supports", "numerics.serve_what_is_not_refused", "numerics.reach_past_int32"}
    drawn = {name for name in names if name.partition(".")[0] in DRAWN}
    checks = names.keys() - of_odd - of_pairs - drawn
    assert len(checks) > 15
    assert {name: set(names[name]) for name in checks} == {name: set(EVERYWHERE) for name in checks}


def test_every_mode_and_step_occurs_with_padding() -> None:
    """All core modes and draft steps occur, both with and without padding requests."""
    assert {forward.mode for forward in TURNS} == set(CORE_MODES)
    assert {forward.step for forward in TURNS if forward.mode is Mode.DRAFT} >= {0, 1, 2, 3, 4}
    for mode in CORE_MODES:
        assert {forward.live < len(forward.requests) for forward in TURNS if forward.mode is mode} == {True, False}


def test_prefixes_cover_every_edge() -> None:
    """Prefixes of length 0, length 1, exactly a page, within a page, and the maximum all occur."""
    for forward in (one for one in TURNS if one.name.endswith("wall") and one.mode is Mode.VERIFY):
        limit = forward.geometry.max_prefix_len
        assert {0, limit, limit - 1} <= {one.prefix for one in forward.requests}
    sizes = {(one.prefix % t.geometry.attention.page_size == 0, one.prefix > 1) for t in TURNS for one in t.requests}
    assert len(sizes) == 4


def test_window_layers_of_topk_1_get_chains() -> None:
    """No item has a tree for topk 1 under a window, where XQA takes a row's position from its index."""
    found = {(item.id, one.name): one for item in all_items((Tier.HOST,)) for one in _forwards_in(item.case.value)}
    chains = {
        key: one
        for key, one in found.items()
        if isinstance(one.geometry, Geometry) and one.geometry.draft.topk == 1
        if one.geometry.attention.window_left >= 0 and one.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY, Mode.DRAFT)
    }
    assert len(chains) > 20
    assert [key for key, one in chains.items() if not one.causal] == []


def _forwards_in(value: object) -> Iterator[ForwardCase]:
    """Yield the forwards in a case's value: in tuples, lists and fields."""
    if isinstance(value, ForwardCase):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _forwards_in(one)
    elif is_dataclass(value) and not isinstance(value, (type, Geometry)):
        for one in fields(value):
            yield from _forwards_in(getattr(value, one.name))


def test_live_requests_own_their_pages() -> None:
    """No page has two owners except one shared prefix page, none is a null page (for padding), and ids are shuffled."""
    shuffled = False
    for forward in TURNS:
        live = [page for one in forward.requests if one.live for page in one.pages]
        assert len(live) - len(set(live)) == ("shared" in forward.name)
        assert min(live, default=forward.null_pages) >= forward.null_pages
        assert max(live, default=0) < forward.num_pages
        shuffled |= live != sorted(live)
    assert shuffled


def test_unique_null_pages_are_disjoint() -> None:
    """If padding must not share slots, every padding request has its own null pages (pages for padding)."""
    for forward in TURNS:
        if forward.mode is Mode.EXTEND:
            continue
        g = forward.geometry
        moved = forward.with_null_pages(g.null_pages(unique_slots=True))
        padded = [page for one in moved.requests if not one.live for page in one.pages]
        assert len(padded) == len(set(padded))
        assert all(page < moved.null_pages for page in padded)


def test_replays_grow_and_shrink() -> None:
    """Replays first use batch sizes 8, 4, 8, 1 and 8."""
    geometry = behaviours()["target"]
    for program in programs_of(geometry):
        assert [len(forward.requests) for _, forward in replays(geometry, program)][:5] == [8, 4, 8, 1, 8]


def test_steps_of_a_round_share_their_prefix() -> None:
    """A later draft step of the same round has the earlier step's tail as its beginning, on the same pages."""
    forward = next(one for one in TURNS if one.mode is Mode.DRAFT and one.step == 2)
    earlier = forward.at_step(1)
    for one, other in zip(forward.requests, earlier.requests, strict=True):
        assert one.parents[: other.tail] == other.parents
        assert one.pages == other.pages


def test_forward_prints_its_batch() -> None:
    """The text of a batch contains the geometry and every request."""
    text = str(max(TURNS, key=lambda forward: len(str(forward))))
    assert "page_size=" in text and "r0:" in text and isinstance(TURNS[0], ForwardCase)
