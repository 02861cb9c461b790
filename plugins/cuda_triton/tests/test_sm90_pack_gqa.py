"""Which elements of q and out a packed row of a tile has, by the kernels' own source: Gluon has no interpreter."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace

import numpy as np
import pytest

from draftmark_cuda_triton.heuristics.sm90 import split_head_dim

try:
    from draftmark_cuda_triton import kernels_sm90
except (ImportError, AttributeError):
    pytest.skip("this Triton has no Gluon as `kernels_sm90` uses it", allow_module_level=True)


class Number(int):
    """A number that a kernel loaded."""

    def to(self, dtype: object) -> int:
        """As wide as it was."""
        return int(self)


class Array(np.ndarray):
    """Numbers that a kernel worked out."""

    def to(self, dtype: object) -> Array:
        """As integers."""
        return self.astype(int)


def multiple_of(value, step):
    """What the compiler is told, and believes."""
    assert not np.any(np.asarray(value) % step)
    return value


def of_rows(*names):
    """Functions of the module, which find each other and NumPy where they ask for Gluon."""
    found = {
        "gl": SimpleNamespace(
            where=np.where, int32=int, int64=np.int64, expand_dims=np.expand_dims, multiple_of=multiple_of,
            arange=lambda begin, end, _: np.arange(begin, end).view(Array), SliceLayout=lambda *_: None,
        ),
        "row_io_layout": lambda _: None,
    }  # fmt: skip
    found |= {name: getattr(kernels_sm90.config, name).fn for name in ("part_offset", "part_width")}
    for name in ("split_packed_row", "reciprocal", "head_columns", "row_pointers", "packed_cells"):
        own = getattr(kernels_sm90.pack_gqa, name).fn
        found[name] = FunctionType(own.__code__, found, name, own.__defaults__)
    return [found[name] for name in names]


@pytest.mark.parametrize(("kv_heads", "group"), [(2, 1), (4, 3), (2, 8), (6, 2)])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [*((1, dim) for dim in (40, 64, 72, 128, 160)), *((2, dim) for dim in (40, 48, 64, 72, 96, 104))],
)
@pytest.mark.parametrize("step", [1, 8])
def test_each_element_has_one_row_and_column(head_dim, kv_heads, group, heads, step):
    """A row has its own head's elements, in that head's columns of the tile, and zeros in all others; what is stored of
    the tile is every element of out, once. Rows and heads may lie anywhere, and as far apart as is told.
    """
    inverse_of, columns_of, rows_between, cells_of = of_rows(
        "reciprocal", "head_columns", "row_pointers", "packed_cells"
    )
    block_d, rest = split_head_dim(heads * head_dim)
    constants = SimpleNamespace(
        KV_HEADS_PER_TILE=heads, HEAD_DIM=head_dim, STRIDE_ALIGN=step, BLOCK_D=block_d, BLOCK_D_REST=rest
    )
    rows, begin, first, beside = 5, Number(3), 2, heads * group
    stride_head = head_dim + step
    stride_row = stride_head * kv_heads * group + 3 * step
    col = np.arange(block_d + rest)
    q = np.full((begin + first + rows) * stride_row, np.nan)
    for row in range(begin + first, begin + first + rows):
        for head in range(kv_heads * group):
            at = row * stride_row + head * stride_head
            q[at : at + head_dim] = 1000 * (row * kv_heads * group + head) + np.arange(head_dim)
    stored = np.zeros(q.size, int)
    for head in range(kv_heads // heads):
        # As a row tile's that begins inside a row's heads: one row less a head.
        count = (rows - 1) * beside
        parts = [cells_of(1, 1 + count, beside, inverse_of(beside), part, constants) for part in range(1 + (rest > 0))]
        assert all((one == 1 + np.arange(64)).all() and not there[count:].any() for one, _, there in parts)
        packed = (1 + np.arange(count)).view(Array)
        wide = [np.broadcast_to(own, there.shape)[:count] for _, own, there in parts]
        own, there = np.hstack(wide).view(Array), np.hstack([there[:count] for _, _, there in parts])
        pointers = rows_between(
            0, Number(begin + first), packed, own, head, beside, inverse_of(beside), stride_row, stride_head, constants
        )
        turned, there_too = columns_of(packed, col, beside, inverse_of(beside), constants, 0)
        assert (turned == own.T).all() and (np.broadcast_to(there_too, there.T.shape) == there.T).all()
        there = np.broadcast_to(there, pointers.shape)
        tile = np.where(there, q[np.where(there, pointers, 0)], 0)
        for number, row in enumerate(packed):
            member = row % beside
            whose = (begin + first + row // beside) * kv_heads * group + head * beside + member
            half = member // group * head_dim
            assert (tile[number, half : half + head_dim] == 1000 * whose + np.arange(head_dim)).all()
            assert not np.delete(there[number], np.s_[half : half + head_dim]).any()
        np.add.at(stored, pointers[there], 1)
    assert stored.max() == 1 and stored.sum() == (rows - 1) * kv_heads * group * head_dim
    assert not np.isnan(q[stored == 1]).any()
