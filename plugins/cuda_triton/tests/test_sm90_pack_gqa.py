"""Tests of packed GQA rows: the Gluon source runs here over NumPy, because Gluon has no interpreter."""

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
    """An integer with the methods that Gluon code calls on a loaded integer."""

    def to(self, dtype: object) -> int:
        """Return the integer; Python's integers have no width."""
        return int(self)


class Array(np.ndarray):
    """An array with the methods that Gluon code calls on a tensor."""

    def to(self, dtype: object) -> Array:
        """Return the array as integers."""
        return self.astype(int)


def multiple_of(value, step):
    """Check the alignment that the kernel declares to the compiler."""
    assert not np.any(np.asarray(value) % step)
    return value


def load_functions(*names):
    """Return functions of `kernels_sm90.pack_gqa` that call each other, and NumPy in place of Gluon."""
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
    """Each element of q is in one row and column of one tile, the other columns are zero, and out is stored once."""
    # The strides below leave gaps between heads and between rows, because q and out can be strided views.
    reciprocal, head_columns, row_pointers, packed_cells = load_functions(
        "reciprocal", "head_columns", "row_pointers", "packed_cells"
    )
    block_d, rest = split_head_dim(heads * head_dim)
    constants = SimpleNamespace(
        KV_HEADS_PER_TILE=heads, HEAD_DIM=head_dim, STRIDE_ALIGN=step, BLOCK_D=block_d, BLOCK_D_REST=rest
    )
    rows, begin, first, packed_group = 5, Number(3), 2, heads * group
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
        # The tile begins at the second head of a row and ends at the first head of a later row. So it has `rows` - 1
        # packed rows of each head.
        count = (rows - 1) * packed_group
        inv_group = reciprocal(packed_group)
        parts = [packed_cells(1, 1 + count, packed_group, inv_group, part, constants) for part in range(1 + (rest > 0))]
        assert all((one == 1 + np.arange(64)).all() and not live[count:].any() for one, _, live in parts)
        packed = (1 + np.arange(count)).view(Array)
        elements = [np.broadcast_to(own, live.shape)[:count] for _, own, live in parts]
        own, live = np.hstack(elements).view(Array), np.hstack([live[:count] for _, _, live in parts])
        pointers = row_pointers(
            0, Number(begin + first), packed, own, head, packed_group, inv_group, stride_row, stride_head, constants
        )
        transposed, live_transposed = head_columns(packed, col, packed_group, inv_group, constants, 0)
        assert (transposed == own.T).all() and (np.broadcast_to(live_transposed, live.T.shape) == live.T).all()
        live = np.broadcast_to(live, pointers.shape)
        tile = np.where(live, q[np.where(live, pointers, 0)], 0)
        for number, row in enumerate(packed):
            member = row % packed_group
            source = (begin + first + row // packed_group) * kv_heads * group + head * packed_group + member
            half = member // group * head_dim
            assert (tile[number, half : half + head_dim] == 1000 * source + np.arange(head_dim)).all()
            assert not np.delete(live[number], np.s_[half : half + head_dim]).any()
        np.add.at(stored, pointers[live], 1)
    assert stored.max() == 1 and stored.sum() == (rows - 1) * kv_heads * group * head_dim
    assert not np.isnan(q[stored == 1]).any()
