"""Selection of the Hopper kernel for latent rows, its compilation, and random batches on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.heuristics import latent as hopper
from draftmark_cuda_triton.heuristics import select
from draftmark_cuda_triton.heuristics.common import Kernel
from draftmark_cuda_triton.launch import attention, tma
from plugins.cuda_triton.tests.compiling import loops_of
from plugins.cuda_triton.tools import latent_fuzz

H200 = DeviceProfile("cuda", 90, 132)
E4M3 = "float8_e4m3fn"
SMEM_BYTES = 227 << 10
"""Shared memory of a CTA."""
MAX_SPILLS = 120
"""Most accesses to local memory in loops with products: 17 with the assembler of Triton 3.6, 109 with 3.9's. They
occur for windows over trees with q in registers."""


def latent(heads=16, value=512, rest=64, page=64, dtype="bfloat16", kv_dtype="", **fields) -> AttentionShape:
    """Return a latent shape."""
    return AttentionShape(
        heads, 1, value + rest, page, dtype, kv_dtype or dtype, softmax_scale=0.1, value_dim=value, latent=True,
        **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("value", "rest", "stages"),
    [
        (512, 64, (2, 3, 3, 2)), (512, 32, (2, 3, 3, 2)), (512, 0, (2, 3, 3, 2)), (256, 64, (4, 4, 3, 2)),
        (256, 0, (4, 4, 3, 2)), (128, 32, (4, 4, 4, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("page", [8, 16, 48, 64])
def test_hopper_kernels_serve_rows_of_models(value, rest, stages, page):
    """On sm_90 batches of any number of rows and heads take a Hopper kernel, with the stages that fit."""
    few = (Kernel.SM90_LATENT if value == 512 else Kernel.SM90_LATENT_RS), "bfloat16", stages[0], 64
    many = Kernel.SM90_LATENT_RS, "bfloat16", stages[1], 64
    large = Kernel.SM90_LATENT_RS, "bfloat16", stages[2], 128 if value == 256 else 64
    e4m3 = Kernel.SM90_LATENT_RS, E4M3, stages[3], 64
    for heads, rows, num_reqs, (kernel, kv_dtype, count, keys) in (
        (1, 1, 1, few), (20, 3, 8, few), (16, 4, 118, few), (16, 4, 120, many), (20, 4, 8, large), (128, 1, 1, large),
        (16, 4, 1, e4m3), (20, 3, 200, e4m3),
    ):  # fmt: skip
        shape = latent(heads, value, rest, page, "bfloat16", kv_dtype)
        config = select.select_config(shape, H200, rows, num_reqs=num_reqs)
        assert config.kernel is kernel
        assert (config.num_consumer_wgs, config.block_m, config.block_n, config.num_stages) == (3, 64, keys, count)
        assert config in select.config_candidates(shape, H200)


@pytest.mark.parametrize(("heads", "rows", "packed"), [(1, 1, 16), (16, 1, 16), (20, 1, 32), (8, 4, 32)])
def test_few_packed_rows_over_e4m3_take_small_row_tiles(heads, rows, packed):
    """Products of few packed rows take less time if K and V are the first operand."""
    shape = latent(heads, kv_dtype=E4M3)
    config = select.select_config(shape, H200, rows)
    assert (config.kernel, config.block_m, config.num_stages) == (Kernel.SM90_LATENT_SWAP_AB, packed, 4)
    assert config in select.config_candidates(shape, H200)
    narrow = select.select_config(latent(heads, 256, kv_dtype=E4M3), H200, rows)
    assert (narrow.kernel, narrow.block_m) == (Kernel.SM90_LATENT_RS, 64)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page": 4}, "pages of a multiple of 8"), ({"page": 1}, "pages of a multiple of 8"),
        ({"dtype": "float32"}, "need 16-bit q"), ({"kv": "float16"}, "rows of q's dtype or e4m3"),
        ({"rest": 128}, "a rest of 0, 32, 64"), ({"value": 384}, "values of 128, 256, 512"),
    ],
    ids=str,
)  # fmt: skip
def test_other_rows_take_the_portable_kernel(fields, reason):
    """Rows that the Hopper kernel does not serve have a reason, and take a portable tile."""
    given = {"heads": 16, "value": 512, "rest": 64, "page": 64, "dtype": "bfloat16"} | fields
    shape = latent(*(given[name] for name in ("heads", "value", "rest", "page", "dtype")))
    shape = replace(shape, kv_dtype=given.get("kv", shape.kv_dtype))
    assert any(reason in one for one in hopper.reasons_against_sm90(shape, H200))
    assert select.select_config(shape, H200, 4).num_consumer_wgs == 0
    assert hopper.reasons_against_sm90(latent(), replace(H200, arch=100))


def test_tensors_that_tma_cannot_load_take_the_portable_kernel():
    """A cache or rows of q with a pitch that TMA cannot load keep the row tile and lose the warp groups."""
    shape = latent()
    config = select.select_config(shape, H200, 4)
    for boxes in (True, False):
        adapted = select.adapt_to_cache(shape, H200, config, True, boxes, True)
        assert adapted.block_m == config.block_m and (adapted.num_consumer_wgs == 3) is boxes
    q = torch.empty(6, 20, 576, dtype=torch.bfloat16)
    assert tma.has_flat_rows(q) and tma.has_flat_rows(q[:, :1]) and tma.has_flat_rows(q[2:3, :16])
    assert not tma.has_flat_rows(q[2:, :16]) and not tma.has_flat_rows(q[..., 1:])
    assert attention.has_aligned_rows(q) and attention.has_aligned_rows(q[2:, :16])
    assert not attention.has_aligned_rows(q[..., 1:])


def test_rows_of_q_with_two_pitches_take_another_kernel():
    """If TMA cannot load packed rows of q, a kernel that copies them serves 16-bit rows, a portable one e4m3 rows."""
    for kv_dtype, kernel in (("bfloat16", Kernel.SM90_LATENT), (E4M3, Kernel.POINTERS)):
        shape = latent(128, kv_dtype=kv_dtype)
        config = select.select_config(shape, H200, 8, num_reqs=64)
        assert select.adapt_to_cache(shape, H200, config, True, True) == config
        adapted = select.adapt_to_cache(shape, H200, config, True, True, flat_q=False)
        assert adapted.kernel is kernel and (adapted.block_m, adapted.block_n) == (config.block_m, config.block_n)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shape", "num_reqs"),
    [
        (latent(128), 4), (latent(20, page=16, sinks=True, window_left=100), 4), (latent(40, 128, 32, 48), 4),
        (latent(128), 200), (latent(12, 256, page=48), 200),
        (latent(128, kv_dtype=E4M3), 4), (latent(20, page=16, kv_dtype=E4M3, window_left=100), 4),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (latent(rest=0), 4), (latent(12, 256), 4), (latent(12, 256, kv_dtype=E4M3), 4),
                (latent(1, kv_dtype=E4M3, window_left=100), 1),
            )
        ),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_kernels_compile_without_serialized_products(monkeypatch, tmp_path, shape, num_reqs):
    """Every kernel fits in shared memory, its products overlap, and its loops hardly use local memory."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a test of interpreted kernels may have set it in this process
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    modes = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT_BLOCK)
    geometry = Geometry.create(shape, Limits(num_reqs, 4096), DraftShape(4, 4, 32, 4), H200, modes)
    swapped = shape.kv_dtype == E4M3 and num_reqs == 1
    name = "attend_latent_rs" if num_reqs > 4 or shape.kv_dtype == E4M3 else "attend_latent"
    name = "attend_latent_swap_ab" if swapped else name
    found = [one for one in kernel_list.kernels_of(geometry, 90) if one.kernel.__name__ == name]
    kinds = [dict(one.constexprs)[one.kernel.arg_names.index("TAIL_KIND"),] for one in found]
    assert sorted(set(kinds)) == [0, 1, 2]
    for one in found:
        binary = one.compile()
        assert binary.metadata.shared <= SMEM_BYTES
        loops = [body for body in loops_of(binary.asm["cubin"], tmp_path) if any("HGMMA" in line for line in body)]
        assert len(loops) >= 3
        # A wait for products follows each chain of products, and next to e4m3 rows the first of two chains of values.
        # With too few registers it follows each product.
        waits = sum("DEPBAR.LE gsb0" in line for body in loops for line in body)
        # A wait that leaves products in progress follows each two or four products that convert their operands.
        two_chains = shape.kv_dtype == E4M3 and shape.value_width > 256
        products = sum("HGMMA" in line for body in loops for line in body)
        assert waits <= (products // 2 if swapped else len(loops) + 2 * two_chains)
        spills = sum("LDL" in line or "STL" in line for body in loops for line in body)
        assert spills <= MAX_SPILLS


@pytest.mark.device
def test_random_batches_equal_float64_on_a_gpu():
    """Random batches of 42 shapes: outputs and log-sum-exps of every mode, poisoned outputs, equal bits twice."""
    assert latent_fuzz.fuzz(60, 30.0, seed=7) == 0
