"""Compilation of every kernel to machine code with the installed Triton; no GPU is needed.

Gluon is experimental: from Triton 3.6 to 3.9 three of the names that `kernels_sm90` uses changed.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from draftmark import (
    FP8_DS_MLA,
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Form,
    Geometry,
    Limits,
    Mode,
)
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.kernel_variants import kernels
from draftmark_cuda_triton.launch import metadata, operands
from plugins.cuda_triton.tests.compiling import (
    COLUMNS,
    OTHERS,
    USUAL,
    Case,
    compile_for,
    config_of,
)


@pytest.mark.parametrize(
    "case", [*USUAL[:2], *(pytest.param(one, marks=pytest.mark.long) for one in USUAL[2:])], ids=str
)
def test_kernels_compile_for_hopper(fake_gpu, case):
    """The Hopper kernels compile, together with the other kernels that a layer launches."""
    compile_for(case, 90)
    names = [source.fn.__name__ for source, _ in fake_gpu.launched]
    assert names[0] == "write_kv_rows" and any(name.startswith("attend_") for name in names)
    assert "kernels_sm90" in next(
        source.fn.__module__ for source, _ in fake_gpu.launched if "attend" in source.fn.__name__
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(1, heads=(64, 8), head_dim=64), "attend_decode_verify"),
        pytest.param(Case(4, heads=(16, 4), head_dim=96), "attend_decode_verify", marks=pytest.mark.slow),
        (Case(1, heads=(16, 8), head_dim=80), "attend_decode_verify_gather"),
        pytest.param(Case(1, heads=(64, 8), head_dim=64, fp8=True), "attend_decode_verify", marks=pytest.mark.slow),
        (Case(1, heads=(16, 8), head_dim=80, fp8=True), "attend_decode_verify_fp8"),
    ],
    ids=str,
)
def test_kernels_compile_for_non_adjacent_heads(fake_gpu, case, name):
    """Shapes that merge two adjacent KV heads also compile for caches with non-adjacent heads."""
    compile_for(case, 90, adjacent_heads=False)
    assert name in [source.fn.__name__ for source, _ in fake_gpu.launched]


@pytest.mark.long
@pytest.mark.parametrize(("reqs", "rows"), [(2, 70), (40, 40), (3, 900), (100, 300)])
def test_schedules_of_any_size_compile(fake_gpu, reqs, rows):
    """The metadata kernels compile for any number of requests and rows."""
    config = config_of(Case(0), 90)
    lens, indptr = torch.ones(reqs, dtype=torch.int32), torch.ones(reqs + 1, dtype=torch.int32)
    table, slots = torch.ones(reqs, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    tiles, work = torch.ones(4096, dtype=torch.int32), torch.ones(4096, dtype=torch.int32)
    shape = operands.AttentionParams(8, 4, 128, 16, 0.1)
    for schedule in ((), (None, work, 16, 132)):
        metadata.write_metadata_prefill(shape, config, rows, lens, indptr, table, slots, tiles, *schedule)
    for splits, whole in ((33, False), (reqs, True)):
        extent = operands.BatchExtent(reqs, 3, 3, rows, ragged=True, whole_requests=whole)
        metadata.write_metadata_decode_verify(shape, config, extent, splits, lens, table, slots, work, indptr)
    assert [source.fn.__name__ for source, _ in fake_gpu.launched] == [
        *["write_metadata_prefill"] * 2,
        *["write_metadata_decode_verify"] * 2,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fake_driver", "dtype"),
    [
        *((80, dtype) for dtype in (torch.bfloat16, torch.float32)),
        *(pytest.param(arch, torch.bfloat16, marks=pytest.mark.slow) for arch in (90, 100)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
    indirect=["fake_driver"],
)
def test_soft_cap_is_one_instruction_for_16_bit_rows(fake_gpu, fake_driver, dtype):
    """Generic kernels cap the scores of 16-bit rows with tanh.approx.f32, and those of float32 rows exactly."""
    # A head_dim of 32 is too small for the Hopper kernels, so sm_90 also uses the generic kernels that this test
    # checks.
    case = Case(16, heads=(8, 2), head_dim=32, dtype=dtype, tree=True, cap=50.0)
    compile_for(case, fake_driver._arch)
    caches = kernels.decode_verify.attend_decode_verify.device_caches.values()
    (binary,) = [one for cache, *_ in caches for one in cache.values()]
    assert ("tanh.approx.f32" in binary.asm["ptx"]) == (dtype is torch.bfloat16)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_kernels_of_other_shapes_compile_for_hopper(fake_gpu, case):
    """Hopper kernels compile for e4m3, windows, soft caps, ragged rows, other head sizes and pages without TMA."""
    compile_for(case, 90)
    assert len(fake_gpu.launched) >= 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fake_driver", "case"),
    # `support` rejects e4m3 on GPUs older than Ada (sm_89).
    [(arch, case) for arch in (80, 89, 100, 120) for case in (*USUAL, *OTHERS) if arch >= 89 or not case.fp8],
    indirect=["fake_driver"],
    ids=str,
)
def test_kernels_compile_for_other_architectures(fake_gpu, case):
    """Ampere, Ada and Blackwell use the generic kernels, which compile for them."""
    compile_for(case, fake_gpu.get_current_target().arch)
    assert not any("kernels_sm90" in source.fn.__module__ for source, _ in fake_gpu.launched)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "kv_dtype"), [(16, "bfloat16"), (1, "bfloat16"), (16, "float8_e4m3fn")])
def test_kernels_that_write_lse_compile_for_hopper(monkeypatch, tmp_path, page_size, kv_dtype):
    """Every Hopper kernel also compiles with log-sum-exps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = AttentionShape(32, 8, 128, page_size, kv_dtype=kv_dtype)
    modes = (Mode.EXTEND, Mode.RAGGED_VERIFY)
    geometry = Geometry.create(shape, Limits(2, 4096), DraftShape(1, 1, 4), DeviceProfile("cuda", 90, 132), modes)
    both = kernel_list.kernels_of(geometry, 90, kernel_list.EngineUse(lse=True), trees=False)
    added = [one for one in both if one not in kernel_list.kernels_of(geometry, 90, trees=False)]
    assert len(added) >= 3
    for one in added:
        one.compile()


LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a CTA, in KiB."""

LATENT_ROWS = [
    ((512, 64), 64, "bfloat16", "bfloat16"),
    ((512, 64), 1, "bfloat16", "float8_e4m3fn"),
    ((512, 256), 48, "float16", "float16"),
    ((512, 64), 48, "float32", "float32"),
    ((40, 9), 2, "bfloat16", "bfloat16"),
]
"""Value and rest of a latent row, page size, dtype of q and dtype of the cache."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "row", "page_size", "dtype", "kv_dtype"),
    [
        pytest.param(arch, *case, marks=() if arch == 120 and case is LATENT_ROWS[0] else pytest.mark.slow)
        for arch, case in product(LIMIT_KIB, LATENT_ROWS)
        if arch >= 89 or case[3] != "float8_e4m3fn"
    ],
    ids=str,
)
def test_latent_kernels_compile_within_shared_memory(monkeypatch, tmp_path, arch, row, page_size, dtype, kv_dtype):
    """Every kernel of a latent geometry compiles for each architecture, and its tiles fit in shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    value, rest = row
    shape = AttentionShape(
        20, 1, value + rest, page_size, dtype, kv_dtype, softmax_scale=0.1, value_dim=value, latent=True
    )
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(2, 3, 4), DeviceProfile("cuda", arch, 100), modes)
    attention = [one for one in kernel_list.kernels_of(geometry, arch) if one.kernel.__name__.startswith("attend")]
    assert len(attention) >= 3
    for one in attention:
        assert one.compile().metadata.shared <= LIMIT_KIB[arch] << 10, one


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "heads"),
    [
        pytest.param(arch, heads, marks=() if (arch, heads) in ((90, 128), (80, 16)) else pytest.mark.slow)
        for arch, heads in product(LIMIT_KIB, (128, 20, 16))
    ],
)
def test_kernels_of_chosen_keys_compile_within_shared_memory(monkeypatch, tmp_path, arch, heads):
    """The kernels of rows with lists compile for each architecture, split and not, and their tiles fit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = AttentionShape(heads, 1, 576, 64, softmax_scale=0.1, value_dim=512, latent=True, chosen_width=2048)
    modes, device = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY), DeviceProfile("cuda", arch, 100)
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(2, 3, 4), device, modes)
    attention = [one for one in kernel_list.kernels_of(geometry, arch) if one.kernel.__name__ == "attend_chosen"]
    assert len(attention) == 2
    for one in attention:
        assert one.compile().metadata.shared <= LIMIT_KIB[arch] << 10, one


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "heads", "chosen_width"),
    [
        pytest.param(arch, heads, width, marks=() if (arch, heads) == (90, 16) else pytest.mark.slow)
        for arch in LIMIT_KIB
        for heads, width in ((16, 0), (128, 0), (16, 2048), (128, 2048))
        if arch >= 89
    ],
)
def test_kernels_of_rows_of_656_bytes_compile_within_shared_memory(monkeypatch, tmp_path, arch, heads, chosen_width):
    """Every attention kernel of rows of 656 bytes compiles for each architecture with e4m3, and its tiles fit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    modes, device = (Mode.DECODE, Mode.VERIFY), DeviceProfile("cuda", arch, 132)
    shape = AttentionShape(
        heads, 1, 576, 64, "bfloat16", "float8_e4m3fn", softmax_scale=0.1, value_dim=512, latent=True,
        chosen_width=chosen_width, row_format=FP8_DS_MLA,
    )  # fmt: skip
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(2, 3, 4), device, modes, (Form.ENGINE_STORES,))
    attention = [one for one in kernel_list.kernels_of(geometry, arch) if one.kernel.__name__.startswith("attend")]
    assert attention
    for one in attention:
        assert one.compile().metadata.shared <= LIMIT_KIB[arch] << 10, one
