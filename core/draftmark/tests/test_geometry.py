"""Tests of every length formula of a geometry, against worked examples and brute force over all forwards."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark import CORE_MODES, DRAFT_MODES, TARGET_MODES, Mode, ceil_div, maximum, minimum

SETTINGS = settings(max_examples=150)

small_fields = st.fixed_dictionaries(
    {
        "topk": st.integers(1, 5),
        "num_steps": st.integers(1, 5),
        "num_draft_tokens": st.integers(1, 70),
        "block_size": st.integers(1, 70),
        "num_modules": st.integers(1, 4),
        "page_size": st.integers(1, 20),
        "max_context_len": st.integers(1, 40),
        "max_extend_tokens": st.integers(1, 40),
        "max_num_reqs": st.integers(1, 6),
        "capture_batch_sizes": st.lists(st.integers(1, 9), max_size=3).map(tuple),
        "overlap": st.booleans(),
        "modes": st.lists(st.sampled_from(list(Mode)), min_size=1, unique=True).map(tuple),
    }
)


def forwards(f, modes):
    """Yield (mode, step, rows of one request, tail slots of one request), from the table in the documentation."""
    k, d = f["topk"], f["num_draft_tokens"]
    longest_chunk = min(f["max_extend_tokens"], f["max_context_len"])
    for mode in modes:
        if mode is Mode.EXTEND:
            yield mode, 0, longest_chunk, longest_chunk
        elif mode is Mode.DECODE:
            yield mode, 0, 1, 1
        elif mode is Mode.DRAFT:
            for step in range(f["num_steps"] - 1):
                yield mode, step, k, k * (step + 1)
        elif mode is Mode.DRAFT_BLOCK:
            yield mode, 0, f["block_size"], f["block_size"]
        elif mode is Mode.DRAFT_EXTEND:
            yield mode, 0, d + f["num_modules"] - 1, d + f["num_modules"] - 1
        else:
            yield mode, 0, d, d


def longest_prefix(f, mode, tail):
    """Return the longest prefix of a forward: the context limit, plus the longest tail with overlap.

    With overlap, a step starts before the host reads how many tokens the last step committed.
    """
    wall = f["max_context_len"]
    if mode is Mode.EXTEND:
        return wall - tail
    unseen = max(
        [f["num_draft_tokens"] + f["num_modules"] - 1, f["block_size"]]
        + [t for _, _, _, t in forwards(f, (Mode.DRAFT,))]
    )
    return wall + (unseen if f["overlap"] else 0)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param(
            {}, {"max_tail": 1, "max_kv_len": 33, "max_pages_per_req": 9, "mask_words": 1}, id="no speculation"
        ),
        pytest.param(
            {"num_draft_tokens": 5, "max_context_len": 8192, "page_size": 64},
            {"max_tail": 5, "max_kv_len": 8197, "max_pages_per_req": 129},
            id="sglang#22778: the context is page-aligned, the tail needs one page more",
        ),
        pytest.param(
            {"topk": 4, "num_steps": 5, "num_draft_tokens": 8},
            {"max_tail": 16, "max_kv_len": 48, "max_pages_per_req": 12, "num_draft_steps": 4},
            id="sglang#27338: the draft tail has the factor topk",
        ),
        pytest.param(
            {"topk": 8, "num_steps": 5, "num_draft_tokens": 64, "max_num_reqs": 256, "max_context_len": 131072}
            | {"page_size": 64},
            {"max_tail": 64, "max_pages_per_req": 2049, "mask_words": 2, "max_reqs": 256},
            id="the design's large example: a 2 MiB table, a 128 KiB mask",
        ),
        pytest.param(
            {"num_draft_tokens": 6, "overlap": True},
            {"max_prefix_len": 38, "max_kv_len": 44},
            id="overlap: the device may be one step ahead",
        ),
        pytest.param({"max_num_reqs": 5, "capture_batch_sizes": (8, 4)}, {"max_reqs": 8}, id="padding above the limit"),
        pytest.param({"max_num_reqs": 9, "capture_batch_sizes": (8, 4)}, {"max_reqs": 9}, id="padding below the limit"),
        pytest.param({"num_draft_tokens": 32}, {"mask_words": 1}, id="32 slots fit one word"),
        pytest.param({"num_draft_tokens": 33}, {"mask_words": 2}, id="33 slots need two words"),
        pytest.param({"num_draft_tokens": 256, "block_size": 16}, {"mask_words": 8}, id="a DDTree of 256 nodes"),
        pytest.param(
            {"num_draft_tokens": 4, "num_modules": 3, "max_context_len": 32, "page_size": 4},
            {"max_tail": 6, "draft_extend_rows": 6, "max_kv_len": 38, "max_pages_per_req": 10},
            id="three MTP modules read two more rows again",
        ),
        pytest.param(
            {"page_size": 16, "num_kv_heads": 2, "head_dim": 128, "kv_dtype": "bfloat16"},
            {"page_bytes": 2 * 16 * 2 * 128 * 2},
            id="a page holds K and V",
        ),
        pytest.param({"kv_dtype": "float8_e4m3fn"}, {"page_bytes": 2 * 4 * 2 * 8}, id="one byte per fp8 number"),
    ],
)
def test_worked_examples(make_geometry, fields, expected):
    """Each length formula gives the number that was computed by hand."""
    geometry = make_geometry(**fields)
    assert {name: getattr(geometry, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("mode", "step", "rows", "tail"),
    [
        (Mode.EXTEND, 0, 16, 16),
        (Mode.DECODE, 0, 1, 1),
        (Mode.DRAFT, 0, 3, 3),
        (Mode.DRAFT, 1, 3, 6),
        (Mode.DRAFT, 2, 3, 9),
        (Mode.VERIFY, 0, 7, 7),
        (Mode.DRAFT_EXTEND, 0, 7, 7),
    ],
)
def test_extent_of_each_mode(make_geometry, mode, step, rows, tail):
    """Rows and tail slots of a request follow the mode table; only DRAFT depends on the step."""
    geometry = make_geometry(topk=3, num_steps=4, num_draft_tokens=7)
    extent = geometry.extent(mode, step)
    assert (extent.q_len, extent.tail_len) == (rows, tail)
    if mode is not Mode.DRAFT:
        assert geometry.extent(mode, 2) == extent


def test_an_extend_chunk_is_no_longer_than_the_context(make_geometry):
    """A request's chunk is at most max_context_len, even if the batch may have more tokens."""
    geometry = make_geometry(max_context_len=10, max_extend_tokens=64)
    assert geometry.extent(Mode.EXTEND).q_len == 10
    assert geometry.max_rows(Mode.EXTEND) == 64


@SETTINGS
@given(f=small_fields)
def test_the_page_table_covers_every_addressable_position(make_geometry, f):
    """The page table has a column for every KV position of a valid forward, and some forward uses the last column."""
    geometry = make_geometry(**f)
    wanted = 0
    for mode, _, _, tail in forwards(f, Mode):
        last_position = longest_prefix(f, mode, tail) + tail - 1
        wanted = max(wanted, last_position // f["page_size"] + 1)
    assert geometry.max_pages_per_req == wanted, geometry


@SETTINGS
@given(f=small_fields)
def test_pages_for_counts_the_pages_of_all_positions(make_geometry, f):
    """pages_for(L, T) is the number of distinct pages under positions 0 … L+T-1."""
    geometry = make_geometry(**f)
    prefix, tail = f["max_context_len"], f["num_draft_tokens"]
    touched = {position // f["page_size"] for position in range(prefix + tail)}
    assert geometry.pages_for(prefix, tail) == len(touched)
    assert geometry.pages_for(0, 0) == 0


@SETTINGS
@given(f=small_fields)
def test_max_rows_is_the_largest_legal_forward(make_geometry, f):
    """max_rows and max_rows_any are the largest number of query rows over all batches of the geometry's modes."""
    geometry = make_geometry(**f)
    largest = max([f["max_num_reqs"], *f["capture_batch_sizes"]])
    assert geometry.max_reqs == largest
    for mode in f["modes"]:
        rows = [largest * q for _, _, q, _ in forwards(f, (mode,))]
        if mode is Mode.EXTEND:
            rows = [f["max_extend_tokens"]]
        assert geometry.max_rows(mode) >= max(rows, default=0), geometry
        if rows:
            assert geometry.max_rows(mode) == max(rows), geometry
    assert geometry.max_rows_any == max(geometry.max_rows(mode) for mode in f["modes"])


@SETTINGS
@given(f=small_fields)
def test_a_mask_row_has_a_bit_for_every_tail_slot(make_geometry, f):
    """mask_words is the smallest number of 32-bit words for the largest tail of any mode except EXTEND."""
    geometry = make_geometry(**f)
    slots = max(tail for mode, _, _, tail in forwards(f, [m for m in Mode if m is not Mode.EXTEND]))
    words = 0
    while 32 * words < slots:
        words += 1
    assert (geometry.max_tail, geometry.mask_words) == (slots, words), geometry


@SETTINGS
@given(f=small_fields)
def test_null_pages_give_each_padded_row_its_own_slot(make_geometry, f):
    """With unique_slots no two padded rows of the largest batch share a slot; without it one page serves all rows."""
    geometry = make_geometry(**f)
    assert geometry.null_pages() == 1
    pages = geometry.null_pages(unique_slots=True)
    per_request = pages // geometry.max_reqs
    for _, _, _, tail in forwards(f, [mode for mode in Mode if mode is not Mode.EXTEND]):
        slots = [
            (request * per_request + slot // f["page_size"]) * f["page_size"] + slot % f["page_size"]
            for request, slot in product(range(geometry.max_reqs), range(tail))
        ]
        assert len(set(slots)) == len(slots), geometry
        assert max(slots) < pages * f["page_size"], geometry


@given(a=st.integers(0, 10**6), b=st.integers(1, 10**4))
def test_ceil_div_is_the_smallest_cover(a, b):
    """ceil_div(a, b) is the smallest number of groups of b elements that hold a elements."""
    groups = ceil_div(a, b)
    assert groups * b >= a > (groups - 1) * b


@given(values=st.lists(st.integers(), min_size=1, max_size=5))
def test_maximum_and_minimum_of_ints_are_pythons(values):
    """For plain ints, maximum and minimum equal max and min, also with one argument."""
    assert maximum(*values) == sorted(values)[-1]
    assert minimum(*values) == sorted(values)[0]


def test_create_resolves_the_scale_and_orders_capture_sizes(make_geometry):
    """softmax_scale None becomes head_dim ** -0.5, another value stays; capture sizes are sorted and distinct."""
    geometry = make_geometry(head_dim=64, capture_batch_sizes=(8, 1, 8, 4))
    assert geometry.attention.softmax_scale == 0.125
    assert geometry.limits.capture_batch_sizes == (1, 4, 8)
    assert make_geometry(softmax_scale=0.3).attention.softmax_scale == 0.3


def test_the_draft_model_does_not_decode_or_verify():
    """Target and draft model share only the mode EXTEND, so a draft model has no DECODE or VERIFY."""
    assert set(TARGET_MODES) & set(DRAFT_MODES) == {Mode.EXTEND}
    assert set(TARGET_MODES) | set(DRAFT_MODES) == set(CORE_MODES)


def test_group_size_is_query_heads_per_kv_head(make_geometry):
    """`group_size` is 4 for 8 query heads and 2 KV heads."""
    assert make_geometry(num_qo_heads=8, num_kv_heads=2).attention.group_size == 4
