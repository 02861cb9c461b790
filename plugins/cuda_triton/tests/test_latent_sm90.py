"""Selection of the Hopper kernel for latent rows, its compilation, and random batches on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.heuristics import latent as hopper
from draftmark_cuda_triton.heuristics import select
from draftmark_cuda_triton.launch import attention
from plugins.cuda_triton.tests.compiling import loops_of
from plugins.cuda_triton.tools import latent_fuzz

H200 = DeviceProfile("cuda", 90, 132)
SMEM_BYTES = 227 << 10
"""Shared memory of a CTA."""
MAX_SPILLS = 64
"""Most accesses to local memory in loops with products: none with the assembler of Triton 3.6, 63 with 3.9's."""


def latent(heads=16, value=512, rest=64, page=64, dtype="bfloat16", **fields) -> AttentionShape:
    """Return a latent shape."""
    return AttentionShape(
        heads, 1, value + rest, page, dtype, dtype, softmax_scale=0.1, value_dim=value, latent=True, **fields
    )


@pytest.mark.parametrize(
    ("value", "rest", "stages"), [(512, 64, 2), (512, 32, 2), (512, 0, 2), (256, 64, 4), (128, 32, 4)]
)
@pytest.mark.parametrize("page", [8, 16, 48, 64])
def test_hopper_kernel_serves_rows_of_models(value, rest, stages, page):
    """On sm_90 batches of any number of rows and heads take the Hopper kernel, with the stages that fit."""
    for heads, rows in ((1, 1), (20, 3), (128, 64)):
        config = select.select_config(latent(heads, value, rest, page, "bfloat16"), H200, rows)
        assert (config.num_consumer_wgs, config.block_m, config.num_stages) == (3, 64, stages)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"page": 4}, "pages of a multiple of 8"), ({"page": 1}, "pages of a multiple of 8"),
        ({"dtype": "float32"}, "need 16-bit q"), ({"kv": "float8_e4m3fn"}, "rows of q's dtype"),
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
    assert attention.has_aligned_rows(q) and attention.has_aligned_rows(q[2:, :16])
    assert not attention.has_aligned_rows(q[..., 1:])


@pytest.mark.long
@pytest.mark.parametrize(
    "shape",
    [
        latent(128), latent(20, page=16, sinks=True, window_left=100), latent(rest=0), latent(12, 256),
        latent(40, 128, 32, 48),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_kernel_compiles_without_serialized_products(monkeypatch, tmp_path, shape):
    """Every kernel fits in shared memory, its products overlap, and its loops hardly use local memory."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # a test of interpreted kernels may have set it in this process
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    modes = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT_BLOCK)
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(4, 4, 32, 4), H200, modes)
    found = [one for one in kernel_list.kernels_of(geometry, 90) if one.kernel.__name__ == "attend_latent"]
    assert len(found) == 3
    for one in found:
        binary = one.compile()
        assert binary.metadata.shared <= SMEM_BYTES
        loops = [body for body in loops_of(binary.asm["cubin"], tmp_path) if any("HGMMA" in line for line in body)]
        assert len(loops) >= 3
        # A wait for products follows each chain of products. With too few registers it follows each product.
        waits = sum("DEPBAR.LE gsb0" in line for body in loops for line in body)
        assert waits <= len(loops)
        spills = sum("LDL" in line or "STL" in line for body in loops for line in body)
        assert spills <= MAX_SPILLS


@pytest.mark.device
def test_random_batches_equal_float64_on_a_gpu():
    """Random batches of 42 shapes: outputs and log-sum-exps of every mode, poisoned outputs, equal bits twice."""
    assert latent_fuzz.fuzz(60, 30.0, seed=7) == 0
