"""Tests of the decoder of backends' metadata: each layout that a backend may declare, with handwritten buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import Mode
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.lengths import Unknown
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec
from draftmark_contract.oracle.decode import Decoded, Shape, decode
from draftmark_contract.oracle.history import Request, chain
from draftmark_contract.oracle.problem import DecodeProblem
from draftmark_contract.oracle.truth import enumerate_truth

PREFIX, TAIL, BOTH = LengthConvention.PREFIX, LengthConvention.TAIL, LengthConvention.PREFIX_PLUS_TAIL
SHAPE = Shape(page_size=4, window_left=-1)
TREE = (-1, 0, 0, 1)
REQUESTS = [
    Request(5, (9, 2, 7), TREE, 4),
    Request(8, (4, 3, 6), TREE, 4),
    Request(0, (0,), chain(4), 4, live=False),
]
"""L + T is 9 and 12, so one last page is partial and one full; the third request is padding."""
LEVEL_OF_PAGES = {"kv_indptr": "indptr", "kv_indices": "indices", "kv_last_page_len": "last"}


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


def batch(tree: bool = True) -> ForwardBatch:
    """Return a VERIFY batch of `REQUESTS`, with a draft tree or a causal tail."""
    masks = [0b1, 0b11, 0b101, 0b1011] * 2 + [1, 2, 4, 8]
    tail = Tree(ints(*masks).view(12, 1), ints(*[0, 1, 1, 2] * 2, 0, 0, 0, 0).view(3, 4)) if tree else Causal()
    table = ints(9, 2, 7, 1, 4, 3, 6, 1, 0, 0, 0, 0).view(3, 4)
    lens, rows = ints(5, 8, 0), torch.zeros(12, dtype=torch.int64)
    indptr = ints(0, 4, 8, 12)
    return ForwardBatch(
        Mode.VERIFY, 0, lens, indptr, table, tail, rows, Unknown(2, 20), 2, (4,) * 3, (4,) * 3, 12, None
    )


def agrees(found: Decoded) -> bool:
    """Return True if the decoded rows of live requests see the tokens that brute force finds."""
    truth = enumerate_truth(REQUESTS, 4, -1)
    return all(found.visible[row] == truth.visible[row] for row in truth.visible if row[0] < 2)


def read(spec: MetadataSpec, arena: dict[str, torch.Tensor], tree: bool = True, staged: bool = False) -> Decoded:
    return decode(spec, arena, batch(tree), REQUESTS, replace(SHAPE, staged=staged))


def pages(**changed: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return CSR buffers with the pages of prefix and tail; `changed` replaces buffers."""
    right = {"indptr": ints(0, 3, 6, 7), "indices": ints(9, 2, 7, 4, 3, 6, 0, -1), "last": ints(1, 4, 4)}
    return {**right, **changed}


PAGES = MetadataSpec((Level(Layout.CSR_PAGES, BOTH, LEVEL_OF_PAGES, masked=True),))


def test_page_table_of_the_batch_itself() -> None:
    """A backend without own buffers is decoded from the batch's page table."""
    assert agrees(read(MetadataSpec((Level(Layout.PAGE_TABLE, BOTH, masked=True),)), {}))


def test_csr_pages() -> None:
    """CSR pages are decoded from indptr, page ids and the length of each last page."""
    assert agrees(read(PAGES, pages()))


def test_csr_tokens() -> None:
    """CSR tokens are decoded from indptr and token slots."""
    slots = [36, 37, 38, 39, 8, 9, 10, 11, 28, *range(16, 20), *range(12, 16), *range(24, 28), 0, 1, 2, 3]
    spec = MetadataSpec((Level(Layout.CSR_TOKENS, BOTH, {"kv_indptr": "p", "kv_indices": "i"}, masked=True),))
    assert agrees(read(spec, {"p": ints(0, 9, 21, 25), "i": ints(*slots)}))


@pytest.mark.parametrize("layout", [Layout.CSR_PAGES, Layout.CSR_TOKENS, Layout.PAGE_TABLE])
def test_two_levels(layout: Layout) -> None:
    """An unmasked pass over the prefix and a masked pass over the tail decode to one set of keys per row."""
    prefix = Level(Layout.PAGE_TABLE, PREFIX, {"kv_lens": "lens"})
    names = {"kv_indptr": "p", "kv_indices": "i", "kv_last_page_len": "last"}
    tail = Level(layout, TAIL, {} if layout is Layout.PAGE_TABLE else names, masked=True)
    arena = {"lens": ints(5, 8, 0), "last": ints(1, 4, 4)}
    if layout is Layout.CSR_PAGES:
        arena |= {"p": ints(0, 2, 3, 4), "i": ints(2, 7, 6, 0)}
    else:
        arena |= {"p": ints(0, 4, 8, 12), "i": ints(9, 10, 11, 28, 24, 25, 26, 27, 0, 1, 2, 3)}
    assert agrees(read(MetadataSpec((prefix, tail)), arena))


def test_packed_mask_in_bytes() -> None:
    """In a packed bit mask, each request starts at its own byte, and its mask rows follow each other without gaps."""
    rows = [0b0001, 0b0011, 0b0101, 0b1011]
    bits = sum(row << 4 * n for n, row in enumerate(rows))
    mask = ints(bits & 255, bits >> 8, 99, bits & 255, bits >> 8, 0, 0, dtype=torch.uint8)
    level = Level(Layout.PAGE_TABLE, BOTH, {"tail_mask": "mask", "mask_indptr": "at"}, masked=True)
    assert agrees(read(MetadataSpec((level,), mask_dtype="uint8"), {"mask": mask, "at": ints(0, 3, 5, 7)}))


def test_strided_mask_with_dummy_rows() -> None:
    """The qo_indptr of staged queries counts six rows per request, and the last four are real. Mask words are int16."""
    rows = [[1, 0], [1, 0], [0b1, 0], [0b11, 0], [0b101, 0], [0b1011, 0]]
    flat = [word for _ in range(3) for row in rows for word in row]
    level = Level(Layout.PAGE_TABLE, BOTH, {"tail_mask": "mask", "qo_indptr": "qo"}, masked=True)
    spec = MetadataSpec((level,), mask_stride=2, mask_dtype="int16")
    arena = {"mask": ints(*flat, dtype=torch.int16), "qo": ints(0, 6, 12, 18)}
    assert agrees(read(spec, arena, staged=True))
    with pytest.raises(DecodeProblem, match="does not count the rows"):  # unstaged, a request has 4 rows, not 6
        read(spec, arena)


def test_causal_tail_needs_no_mask() -> None:
    """A level without a mask is causal: row j sees the tail up to its own token."""
    found = read(MetadataSpec((Level(Layout.PAGE_TABLE, BOTH, masked=True),)), {}, tree=False)
    assert found.visible[0, 1] == (8, 9, 10, 36, 37, 38, 39)


def test_live_extent_leaves_padding_out() -> None:
    """If live_extent is "live", padding requests are empty in indptr and are not decoded."""
    spec = MetadataSpec(PAGES.levels, live_extent="live")
    found = read(spec, pages(indptr=ints(0, 3, 6, 6)))
    assert agrees(found)
    assert all(n < 2 for n, _ in found.visible)


def test_pad_fill_of_one() -> None:
    """If pad_fill is 1, a padding request may have one token before its tail."""
    spec = MetadataSpec((Level(Layout.PAGE_TABLE, BOTH, {"kv_lens": "lens"}, masked=True),), pad_fill=1)
    assert agrees(read(spec, {"lens": ints(9, 12, 5)}))


def test_opaque_layout_is_not_decoded() -> None:
    """An opaque layout is not decoded, and the result is marked as opaque."""
    assert read(MetadataSpec((Level(Layout.OPAQUE, BOTH),)), {}).opaque


@pytest.mark.parametrize(
    "changed",
    [
        {"indptr": ints(0, 3, 6, -1)},
        {"indptr": ints(1, 3, 6, 7)},
        {"indptr": ints(0, 3, 6)},
        {"indptr": ints(0, 3, 6, 40)},
        {"indices": ints(9, 2, -1, 4, 3, 6, 0)},
        {"last": ints(0, 4, 4)},
        {"last": ints(1, 5, 4)},
        {"last": ints(2, 4, 4)},
    ],
)
def test_invalid_metadata_raises(changed: dict[str, torch.Tensor]) -> None:
    """If indptr falls or is short, or an index or last page length is invalid, decoding raises `DecodeProblem`."""
    with pytest.raises(DecodeProblem):
        read(PAGES, pages(**changed))


@pytest.mark.parametrize("changed", [{"indices": ints(9, 7, 2, 4, 3, 6, 0)}, {"indices": ints(9, 9, 7, 4, 3, 6, 0)}])
def test_wrong_pages_are_detected(changed: dict[str, torch.Tensor]) -> None:
    """If pages are swapped or repeated, the decoded tokens differ from brute force."""
    assert not agrees(read(PAGES, pages(**changed)))


def test_mask_bits_above_the_tail_raise() -> None:
    """If a mask has bits set at or above the tail's length T, decoding raises an error."""
    level = Level(Layout.PAGE_TABLE, BOTH, {"tail_mask": "mask"}, masked=True)
    mask = ints(*[1, 3, 5, 11 | 1 << 4] * 2, 1, 2, 4, 8)
    with pytest.raises(DecodeProblem, match="at and above"):
        read(MetadataSpec((level,), mask_stride=1), {"mask": mask})
