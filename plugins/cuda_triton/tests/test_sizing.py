"""Buffer sizes, rejected geometries, and bytes that a batch may use."""

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
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.heuristics import common, select, split_kv
from draftmark_cuda_triton.launch import tma
from draftmark_cuda_triton.support import reasons_against
from plugins.cuda_triton.tests.shapes import with_boxes

H200 = DeviceProfile("cuda", 90, 132)


def geometry(modes=TARGET_MODES, device=H200, **attention):
    shape = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 64, **attention}
    limits = Limits(256, 131072, 8192, (256,))
    return Geometry.create(AttentionShape(**shape), limits, DraftShape(8, 5, 64), device, modes)


@pytest.mark.parametrize("modes", [TARGET_MODES, DRAFT_MODES])
def test_buffers_do_not_grow_with_requests_times_length(modes):
    """Buffers for 256 requests, a context of 131072, topk 8 and 64 draft tokens take less than 32 MiB."""
    assert sum(spec.nbytes for spec in sizing.buffers(geometry(modes))) < 32 << 20


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 128, 136, 160, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("q_len", [1, 4, 8, 24, 64, 4096])
@pytest.mark.parametrize("fp8", [False, True])
def test_tiles_fit_shared_memory(head_dim, dtype, q_len, fp8):
    """q and the KV stages of the resident CTAs fit into an SM's shared memory."""
    shape = AttentionShape(32, 8, head_dim, 64, dtype, "float8_e4m3fn" if fp8 else dtype)
    config = select.select_config(shape, H200, q_len, prefill=q_len > 64)
    columns = (
        sum(tma.tile_columns(config, head_dim, DTYPE_BYTES[shape.kv_dtype]))
        if config.num_consumer_wgs
        else common.next_power_of_two(head_dim)
    )
    row = columns * {"float32": 4}.get(dtype, 2)
    fp8_bytes = common.next_power_of_two(head_dim) * 2 * config.num_fp8_stages * config.block_n
    stage = config.block_n * row // (2 if config.kernel is common.Kernel.SM90_FP8 else 1)
    weights = config.block_m * config.block_n * 2 if config.kernel is common.Kernel.SM90_FP8 else 0
    used = config.block_m * row + 2 * config.num_stages * stage + fp8_bytes + weights + 1024
    assert used * config.ctas_per_sm <= 228 << 10


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
    """A geometry that the kernels do not serve is rejected with a reason that contains the value."""
    assert any(word in reason for reason in reasons_against(geometry(**change)))


def test_modes_decide_the_declared_buffers():
    """A geometry without EXTEND has no row tiles; every mode has schedule and partial results."""
    names = {spec.name for spec in sizing.buffers(geometry((Mode.EXTEND,)))}
    assert names == {"slot_mapping", "row_tiles", *sizing.SPLIT_BUFFERS}
    few = {spec.name for spec in sizing.buffers(geometry((Mode.DECODE,)))}
    assert few == {"slot_mapping", *sizing.SPLIT_BUFFERS}


@pytest.mark.parametrize(
    ("num_splits", "num_reqs", "expected"),
    [
        *((33, 64, 32), (33, 32, 32), (33, 31, 33), (33, 256, 32), (33, 8, 32), (33, 16, 32), (33, 5, 33)),
        *((33, 48, 33), (9, 1, 9), (1, 5, 1)),
    ],
)
def test_even_splits_keeps_equal_requests_whole(num_splits, num_reqs, expected):
    """Requests of equal length stay whole if that drops at most a twentieth of the splits."""
    assert split_kv.even_splits(num_splits, num_reqs) == expected


@pytest.mark.parametrize("page_size", [8, 16, 32, 48, 64, 128, 256])
@pytest.mark.parametrize("heads", [(32, 8), (28, 4), (40, 8), (64, 8), (12, 1), (16, 4)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_sm90_serves_usual_pages_groups_and_head_dims(page_size, heads, head_dim):
    """On sm_90 usual page sizes, groups and head_dims never fall back to the Triton kernels."""
    shape = AttentionShape(*heads, head_dim, page_size, "bfloat16", "bfloat16")
    assert all(select.select_config(shape, H200, q_len).num_consumer_wgs for q_len in (1, 16, 64, 4096))
    assert not any(
        select.select_config(shape, DeviceProfile("cuda", arch, 132), 16).num_consumer_wgs for arch in (80, 89, 100)
    )


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float8_e4m3fn")])
def test_candidates_contain_every_selected_config(arch, dtypes):
    """Every selected configuration is a sizing candidate, except EXTEND's larger row tiles with three warp groups."""
    device = DeviceProfile("cuda", arch, 132)
    for head_dim in (64, 80, 96, 128, 192, 256):
        for page_size in (1, 16, 48, 64):
            shape = AttentionShape(32, 8, head_dim, page_size, *dtypes)
            known = select.config_candidates(shape, device)
            for q_len in (1, 2, 4, 5, 16, 17, 64, 4096):
                assert with_boxes(select.select_config(shape, device, q_len)) in known
                ragged = with_boxes(select.select_config(shape, device, q_len, prefill=True))
                own = [replace(one, num_stages=ragged.num_stages) for one in known]
                two_groups = (
                    replace(ragged, block_m=128, num_consumer_wgs=2) if ragged.num_consumer_wgs == 3 else ragged
                )
                assert two_groups in (own if ragged.num_consumer_wgs == 3 else known)


@pytest.mark.parametrize(("head_dim", "q_len", "height"), [
    (128, 1, 16), (96, 4, 16), (128, 5, 32), (128, 16, 64), (128, 17, 0), (256, 8, 32), (256, 9, 0), (64, 1, 0),
])  # fmt: skip
def test_few_fp8_rows_use_swap_ab(head_dim, q_len, height):
    """e4m3 decode above head_dim 64 upcasts in registers if its packed rows fit; EXTEND and 16-bit KV never do."""
    shape = AttentionShape(32, 8, head_dim, 16, "bfloat16", "float8_e4m3fn")
    config = select.select_config(shape, H200, q_len)
    assert (config.block_m if config.kernel is common.Kernel.SM90_FP8 else 0) == height
    for one, prefill in ((shape, True), (AttentionShape(32, 8, head_dim, 16), False)):
        assert select.select_config(one, H200, q_len, prefill=prefill).kernel is not common.Kernel.SM90_FP8
