"""Sizes, refusals, and what a step may use."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark import (
    DRAFT_MODES,
    DTYPE_BYTES,
    TARGET_MODES,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Geometry,
    Limits,
    Mode,
)
from draftmark_cuda_triton import boxes, sizing, tiling
from draftmark_cuda_triton.support import reasons_against

H200 = DeviceProfile("cuda", 90, 132)


def geometry(modes=TARGET_MODES, device=H200, **attention):
    shape = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, **attention}
    limits = Limits(256, 131072, 8192, (256,))
    return Geometry.create(AttentionShape(**shape), limits, DraftShape(8, 5, 64), device, modes)


@pytest.mark.parametrize("modes", [TARGET_MODES, DRAFT_MODES])
def test_graph_state_has_no_term_in_requests_times_length(modes):
    """At 256 requests, context 131072, topk 8 and 64 draft tokens a geometry takes less than 32 MiB."""
    assert sum(spec.nbytes for spec in sizing.buffers(geometry(modes))) < 32 << 20


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 136, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_len", [1, 4, 8, 24, 64, 4096])
@pytest.mark.parametrize("narrow", [False, True])
def test_tiles_fit_shared_memory(head_dim, dtype, q_len, narrow):
    """The rows and the keys in flight fit what a multiprocessor has for the programs it is to hold."""
    shape = AttentionShape(32, 8, head_dim, 64, dtype, "float8_e4m3fn" if narrow else dtype)
    tile = tiling.choose(shape, H200, q_len, extend=q_len > 64)
    columns = (
        sum(boxes.columns_of(tile, head_dim, DTYPE_BYTES[shape.kv_dtype]))
        if tile.members
        else tiling.next_power_of_two(head_dim)
    )
    row = columns * {"float32": 4}.get(dtype, 2)
    narrow_row = tiling.next_power_of_two(head_dim) * 2 * tile.depth * tile.block_n
    stage = tile.block_n * row // (2 if tile.narrow else 1)
    weights = tile.block_m * tile.block_n * 2 if tile.narrow else 0
    used = tile.block_m * row + 2 * tile.num_stages * stage + narrow_row + weights + 1024
    assert used * tile.programs_per_sm <= 228 << 10


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"head_dim": 512}, "head_dim 512"),
        ({"kv_dtype": "float16"}, "kv_dtype float16"),
        ({"device": DeviceProfile("cuda", 75, 40)}, "sm_75"),
        ({"device": DeviceProfile("npu", 0, 20)}, "npu"),
        ({"kv_dtype": "float8_e4m3fn", "device": DeviceProfile("cuda", 80, 108)}, "float8_e4m3fn"),
    ],
)
def test_refusals_name_the_value(change, word):
    """What is not served is refused with a reason that names it."""
    assert any(word in reason for reason in reasons_against(geometry(**change)))


def test_modes_decide_what_is_declared():
    """A geometry without EXTEND has no row tiles; schedule and partial results are of any mode."""
    names = {spec.name for spec in sizing.buffers(geometry((Mode.EXTEND,)))}
    assert names == {"slot_mapping", "row_tiles", *sizing.FEW_ROWS}
    few = {spec.name for spec in sizing.buffers(geometry((Mode.DECODE,)))}
    assert few == {"slot_mapping", *sizing.FEW_ROWS}


@pytest.mark.parametrize(
    ("pieces", "num_reqs", "expected"),
    [
        *((33, 64, 32), (33, 32, 32), (33, 31, 33), (33, 256, 32), (33, 8, 32), (33, 16, 32), (33, 5, 33)),
        *((33, 48, 33), (9, 1, 9), (1, 5, 1)),
    ],
)
def test_equal_requests_are_not_cut_for_a_piece_more(pieces, num_reqs, expected):
    """Pieces hold whole requests where that costs a twentieth of them at most."""
    assert tiling.whole(pieces, num_reqs) == expected


@pytest.mark.parametrize("page_size", [8, 16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (40, 8), (64, 8), (12, 1), (16, 4)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_hopper_serves_pages_groups_and_head_dims(page_size, heads, head_dim):
    """On sm_90 no usual page size, group or head_dim falls back to the kernels that load by pointer."""
    shape = AttentionShape(*heads, head_dim, page_size, "bfloat16", "bfloat16")
    assert all(tiling.choose(shape, H200, q_len).members for q_len in (1, 16, 64, 4096))
    assert not any(tiling.choose(shape, DeviceProfile("cuda", arch, 132), 16).members for arch in (80, 89, 100))


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float8_e4m3fn")])
def test_sizing_knows_every_tile(arch, dtypes):
    """What a forward is cut into is among the tiles that the buffers have room for, or EXTEND's and taller than one."""
    device = DeviceProfile("cuda", arch, 132)
    for head_dim in (64, 80, 96, 128, 192, 256):
        for page_size in (1, 16, 48, 64):
            shape = AttentionShape(32, 8, head_dim, page_size, *dtypes)
            known = tiling.candidates(shape, device)
            for q_len in (1, 2, 4, 5, 16, 17, 64, 4096):
                assert replace(tiling.choose(shape, device, q_len), gather=False) in known
                ragged = replace(tiling.choose(shape, device, q_len, extend=True), gather=False)
                own = [replace(one, num_stages=ragged.num_stages) for one in known]
                taller = replace(ragged, block_m=128, members=2) if ragged.members == 3 else ragged
                assert taller in (own if ragged.members == 3 else known)


@pytest.mark.parametrize(("head_dim", "q_len", "height"), [
    (128, 1, 16), (96, 4, 16), (128, 5, 32), (128, 16, 64), (128, 17, 0), (256, 8, 32), (256, 9, 0), (64, 1, 0),
])  # fmt: skip
def test_few_rows_over_e4m3_are_widened_in_registers(head_dim, q_len, height):
    """As many packed rows as registers allow, of a head whose half wgmma has rows for; never EXTEND, nor other KV."""
    shape = AttentionShape(32, 8, head_dim, 16, "bfloat16", "float8_e4m3fn")
    tile = tiling.choose(shape, H200, q_len)
    assert (tile.block_m if tile.narrow else 0) == height
    assert not tiling.choose(shape, H200, q_len, extend=True).narrow
    assert not tiling.choose(AttentionShape(32, 8, head_dim, 16), H200, q_len).narrow
