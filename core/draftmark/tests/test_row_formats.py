"""Latent rows of 656 bytes: the geometry, sizes, pool and cache, refusals, and the reference on them."""

from __future__ import annotations

import math

import pytest
import torch

import draftmark
from core.draftmark.tests.latent_shapes import plugin_with
from draftmark import (
    FP8_DS_MLA,
    PLAIN_ROWS,
    AttentionShape,
    BatchError,
    Form,
    Geometry,
    GeometryError,
    Limits,
    Mode,
)
from draftmark.batch import Causal, Chosen, ForwardBatch
from draftmark.lengths import Exact
from draftmark.runtime import KVCache, KVPool
from draftmark_contract.oracle.row_format import drawn_rows, real_rows, stored_rows
from draftmark_tools.models import latent_shape

STORED = (Form.ENGINE_STORES,)
FIELDS = {"kv_dtype": "float8_e4m3fn", "softmax_scale": 0.1, "value_dim": 512, "latent": True}


def geometry_of(forms=STORED, page_size=16, **fields):
    """Return the geometry of a layer with rows of 656 bytes and four heads."""
    given = {"head_dim": 576, "page_size": page_size, "row_format": FP8_DS_MLA, **FIELDS, **fields}
    return Geometry.create(
        AttentionShape(num_qo_heads=4, num_kv_heads=1, **given), Limits(2, 100), modes=(Mode.DECODE,), forms=forms
    )


def test_a_row_has_656_bytes():
    """512 numbers of one byte, 4 scales of four bytes and 64 numbers of two bytes; queries keep 576 elements."""
    geometry = geometry_of(page_size=64)
    assert (geometry.attention.row_width, geometry.row_bytes, geometry.page_bytes) == (656, 656, 64 * 656)
    assert (geometry.query_width, geometry.output_width) == (4 * 576, 4 * 512)
    plain = geometry_of((), row_format=PLAIN_ROWS)
    assert (plain.attention.row_width, plain.row_bytes) == (576, 576)


@pytest.mark.parametrize(
    ("fields", "forms", "words"),
    [
        ({"row_format": "fp8_ds_mla_"}, STORED, "row_format is 'fp8_ds_mla_', .* write plain or fp8_ds_mla"),
        ({"latent": False}, STORED, "attention.latent is False, but rows of row_format fp8_ds_mla need True"),
        ({"head_dim": 584}, STORED, "attention.head_dim is 584, .* need 576; set it to 576, or row_format to"),
        ({"value_dim": 448}, STORED, "attention.value_dim is 448, .* need 512"),
        ({"kv_dtype": "bfloat16"}, STORED, "attention.kv_dtype is 'bfloat16', .* need float8_e4m3fn"),
        ({"q_dtype": "float16"}, STORED, "attention.q_dtype is 'float16', .* need bfloat16"),
        ({"round_to_e4m3": True}, STORED, "attention.round_to_e4m3 is True, .* need False"),
        ({}, (), r"forms is \(\), but the engine stores rows .*; add Form.ENGINE_STORES"),
        ({}, (*STORED, Form.LATENT_PARTS), "in one buffer; .* remove Form.LATENT_PARTS"),
    ],
    ids=["type", "latent", "head_dim", "value_dim", "kv_dtype", "q_dtype", "rounded", "stores", "parts"],
)
def test_a_shape_that_does_not_fit_is_refused(fields, forms, words):
    """The format has one shape; the error names the first field that differs, and its remedy."""
    with pytest.raises(GeometryError, match=words):
        geometry_of(forms, **fields)


def test_a_pool_holds_whole_rows_without_a_scale():
    """A pool has one tensor of 656 one-byte elements a slot, and its caches have no scale."""
    pool = KVPool(geometry_of(), 2, 5, 1, "cpu")
    assert pool.k.shape == (2, 5, 16, 1, 656) and pool.k.element_size() == 1 and pool.tensors == (pool.k,)
    cache = pool.layers[1]
    assert cache.k_scale is None and cache.v.shape[-1] == 512
    rows = drawn_rows(80, torch.Generator().manual_seed(0))
    pool.k[0].view(torch.uint8).copy_(rows.view(torch.uint8).view(5, 16, 1, 656))
    pool.move(torch.tensor([17]), torch.tensor([40]))
    flat = pool.k[0].view(torch.uint8).flatten(0, 1)
    assert torch.equal(flat[40], flat[17]) and torch.equal(flat[17, 0], rows.view(torch.uint8)[17])


def test_a_plugin_that_does_not_claim_the_format_is_refused_by_name():
    """A plugin that claims latent rows and engine stores only never gets a layer of this format."""
    loaded = draftmark.LoadedBackend("plain", plugin_with("plain", latent=True, forms=STORED))
    reason = "row format fp8_ds_mla is not served: it is not in BackendInfo.row_formats"
    assert loaded.supports(geometry_of()) == [reason]
    with pytest.raises(draftmark.BackendRefusal, match="row format fp8_ds_mla"):
        loaded.allocate(geometry_of(), "cpu")
    assert draftmark.load("reference").supports(geometry_of()) == []


def test_latent_shape_takes_the_format():
    """The shape of DeepSeek V3.2 in this format has an e4m3 cache and its lists of 2,048 keys."""
    config = {
        "model_type": "deepseek_v32", "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
        "num_attention_heads": 128, "index_topk": 2048,
    }  # fmt: skip
    shape = latent_shape(config, ranks=8, page_size=64, row_format=FP8_DS_MLA)
    assert (shape.kv_dtype, shape.row_width, shape.chosen_width) == ("float8_e4m3fn", 656, 2048)
    assert Geometry.create(shape, Limits(2, 4096), forms=STORED).row_bytes == 656


def decode(geometry, rows, lists=None):
    """Return q and the reference's output of one decode that sees the 20 keys of pages 2 and 1."""
    prefix, size = 19, 16
    pages = torch.full((4, size, 656), 255, dtype=torch.uint8)
    pages[2], pages[1, :4] = rows[:16].view(torch.uint8), rows[16:20].view(torch.uint8)
    cache = KVCache.latent(pages.view(torch.float8_e4m3fn), value_dim=512)
    table = torch.zeros(1, int(geometry.max_pages_per_req), dtype=torch.int32)
    table[0, :2] = torch.tensor([2, 1])
    batch = ForwardBatch(
        Mode.DECODE, 0, torch.tensor([prefix], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), table,
        Causal(), torch.tensor([prefix]), Exact((prefix,)), 1, (1,), (1,), 1, None, chosen=lists,
    )  # fmt: skip
    backend = draftmark.load("reference").open(geometry, "cpu", guard=True)
    q = torch.randn(1, 4, 576, generator=torch.Generator().manual_seed(1)).bfloat16()
    out, lse = torch.empty(1, 4, 512, dtype=torch.bfloat16), torch.empty(1, 4)
    backend.plan(batch)
    backend.write_metadata(batch)
    backend.attend(q, cache, batch, out, lse)
    return q[0].double(), out[0].double(), lse[0].double()


@pytest.mark.parametrize("listed", [None, [3, 19, 7, 0, 16]], ids=["all keys", "chosen keys"])
def test_the_reference_reads_rows_exactly(listed):
    """Outputs equal attention in float64 over numbers times scales; a byte-by-byte decoder gives the same rows."""
    rows = drawn_rows(20, torch.Generator().manual_seed(0))
    geometry = geometry_of(chosen_width=0 if listed is None else 8)
    lists = None
    if listed is not None:
        slots = [32 + n if n < 16 else 16 + n - 16 for n in listed]
        lists = Chosen(
            torch.tensor([[*slots, -1, 2**30, 2**30]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32)
        )
    q, out, lse = decode(geometry, rows, lists)
    keys = real_rows(rows)[range(20) if listed is None else listed]
    logits = q @ keys.T * 0.1
    torch.testing.assert_close(lse, logits.logsumexp(-1), atol=1e-4, rtol=0)
    torch.testing.assert_close(out, logits.softmax(-1) @ keys[:, :512], atol=1e-2, rtol=2**-8)


def test_the_oracles_rows_are_the_documented_bytes():
    """Each number of a row, decoded by hand from its bytes, is the oracle's; rows that it makes keep their numbers."""
    numbers = torch.linspace(-3, 5, 576).flip(0)[None] * torch.linspace(0.1, 2, 576)
    row = stored_rows(numbers).view(torch.uint8)[0].tolist()
    real = real_rows(stored_rows(numbers))[0]
    for at in (0, 127, 128, 300, 511):
        block = bytes(row[512 + 4 * (at // 128) : 516 + 4 * (at // 128)])
        scale = torch.frombuffer(bytearray(block), dtype=torch.float32).item()
        sign, exponent, mantissa = row[at] >> 7, (row[at] >> 3) & 15, row[at] & 7
        size = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        assert real[at].item() == math.copysign(size, 0.5 - sign) * scale
        assert real[at].item() == pytest.approx(numbers[0, at].item(), rel=2**-4, abs=2e-2)
    for at in (0, 63):
        word = row[528 + 2 * at] | row[529 + 2 * at] << 8
        value = torch.tensor([word << 16], dtype=torch.int64).to(torch.int32).view(torch.float32).item()
        assert real[512 + at].item() == value == numbers[0, 512 + at].bfloat16().item()


def test_guard_mode_refuses_a_scale_of_the_whole_cache():
    """A scale next to the rows' own would be read by no kernel."""
    geometry = geometry_of()
    backend = draftmark.load("reference").open(geometry, "cpu", guard=True)
    cache = KVCache.latent(torch.zeros(4, 16, 656).to(torch.float8_e4m3fn), torch.ones(1), value_dim=512)
    table = torch.ones(1, int(geometry.max_pages_per_req), dtype=torch.int32)
    batch = ForwardBatch(
        Mode.DECODE, 0, torch.tensor([3], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), table, Causal(),
        torch.tensor([3]), Exact((3,)), 1, (1,), (1,), 1, None,
    )  # fmt: skip
    backend.plan(batch)
    backend.write_metadata(batch)
    q, out = torch.zeros(1, 4, 576).bfloat16(), torch.zeros(1, 4, 512).bfloat16()
    with pytest.raises(BatchError, match="have their own; pass scale=None"):
        backend.attend(q, cache, batch, out)
    wide = KVCache.latent(torch.zeros(4, 16, 576).to(torch.float8_e4m3fn), value_dim=512)
    with pytest.raises(BatchError, match=r"needs float8_e4m3fn \[num_pages, 16, 1, 656\]"):
        backend.attend(q, wide, batch, out)
