"""Tests of latent rows on sm_100 and sm_103: what is refused, and the call of FlashInfer, which never ran here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers
from draftmark.cache import KVCache
from draftmark.errors import BatchError
from draftmark.lengths import Unknown
from draftmark_cuda_trtllm import sizing
from draftmark_cuda_trtllm.gen_latent import GenLatentBackend
from draftmark_cuda_trtllm.support import reasons_against
from draftmark_testing.latent_rows import assert_latent_row, slots_at

B200, B300, H200 = DeviceProfile("cuda", 100, 148), DeviceProfile("cuda", 103, 160), DeviceProfile("cuda", 90, 132)
CHAINS = (Mode.DECODE, Mode.VERIFY)
LENS = (7, 64, 130, 0)


def latent(modes=CHAINS, *, draft=(1, 1, 4), device=B200, limits=None, **attention):
    shape = {"num_qo_heads": 16, "head_dim": 576, "value_dim": 512, "page_size": 64, **attention}
    shape = AttentionShape(num_kv_heads=1, latent=True, softmax_scale=192**-0.5, **shape)
    return Geometry.create(shape, limits or Limits(4, 300, 200), DraftShape(*draft), device, modes)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device": H200}, "latent rows on sm_90"),
        ({"device": DeviceProfile("cuda", 120, 170)}, "latent rows on sm_120"),
        ({"head_dim": 320, "value_dim": 256}, "head_dim 320 with value_dim 256"),
        ({"head_dim": 512}, "head_dim 512 with value_dim 512"),
        ({"num_qo_heads": 20}, "num_qo_heads 20"),
        ({"page_size": 16}, "page_size 16"),
        ({"page_size": 128}, "page_size 128"),
        ({"q_dtype": "float16", "kv_dtype": "float16"}, "q_dtype float16"),
        ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype float8_e4m3fn"),
        ({"window_left": 127}, "window_left 127"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap 30.0"),
        ({"sinks": True}, "sinks"),
        ({"modes": (Mode.EXTEND, Mode.DECODE)}, "mode extend"),
        ({"draft": (4, 3, 7)}, "topk 4"),
    ],
)
def test_refusals_name_the_value(change, word):
    """Each unsupported latent geometry is refused with a reason that contains the value."""
    assert any(word in reason for reason in reasons_against(latent(**change)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"page_size": 32, "device": B300},
        {"num_qo_heads": 128, "draft": (1, 3, 8)},
        {"modes": (Mode.DRAFT, Mode.DRAFT_EXTEND), "draft": (1, 3, 4)},
    ],
)
def test_chains_are_served(change):
    """Decode, verification of chains and chain drafts of 512+64 rows have no reason against them."""
    assert reasons_against(latent(**change)) == []


def decode(query, kv_cache, block_tables, seq_lens, kv_lora_rank, bmm1_scale, out, **rest):
    """Compute MLA decode as FlashInfer documents it: row j of q rows sees the first length - q + 1 + j keys."""
    page_size, q_len = kv_cache.shape[1], query.shape[1]
    for r, length in enumerate(seq_lens.tolist()):
        pages = kv_cache[block_tables[r, : -(-length // page_size)].long()]
        keys = pages.flatten(0, 1)[:length].double()
        scores = torch.einsum("jhd,sd->jhs", query[r].double(), keys) * bmm1_scale
        hidden = torch.arange(length)[None] > torch.arange(q_len)[:, None] + length - q_len
        weights = scores.masked_fill(hidden[:, None], float("-inf")).softmax(-1)
        out[r] = torch.einsum("jhs,sd->jhd", weights, keys[:, :kv_lora_rank]).to(out.dtype)
    return out


def test_chains_equal_the_reference():
    """With FlashInfer's documented semantics, each row attends to its prefix and to the tail up to itself."""
    made = latent(CHAINS)
    a, arena = made.attention, Arena.allocate(sizing.buffers(made), "cpu", guard=True)
    backend, buffers, calls = GenLatentBackend(made, arena), BatchBuffers(made, "cpu"), []
    backend._decode = lambda **given: calls.append(SimpleNamespace(**given)) or decode(**given)
    buffers.prefix_lens.copy_(torch.tensor(LENS))
    width = buffers.page_table.shape[1]
    buffers.page_table.copy_(1 + torch.randperm(4 * width, generator=torch.Generator().manual_seed(0)).view(4, -1))
    rows = torch.randn(4 * width + 1, a.page_size, a.head_dim, generator=torch.Generator().manual_seed(1))
    cache = KVCache.latent(rows.bfloat16(), value_dim=a.value_dim)
    for mode in CHAINS:
        batch = buffers.uniform(mode, 0, 4, 4, Unknown(4, 300), tree=False)
        dice = torch.Generator().manual_seed(2)
        k = torch.randn(batch.num_rows, 1, a.head_dim, generator=dice).bfloat16()
        q = torch.randn(batch.num_rows, a.num_qo_heads, a.head_dim, generator=dice).bfloat16()
        out = torch.full((batch.num_rows, a.num_qo_heads, a.value_dim), float("nan"), dtype=torch.bfloat16)
        backend.plan(batch)
        backend.write_metadata(batch)
        backend.write_kv(k, None, cache, batch)
        backend.attend(q, cache, batch, out)
        q_len = batch.q_lens[0]
        for r, length in enumerate(LENS):
            for j in range(q_len):
                row = r * q_len + j
                keys = cache.k.view(-1, a.head_dim)[slots_at(batch, r, torch.arange(length + j + 1), a.page_size)]
                assert torch.equal(keys[-1], k[row, 0])
                assert_latent_row(q[row], keys, a.value_dim, a.softmax_scale, out[row], about=(mode, r, j))
        assert arena["kv_lens"].tolist() == [n + q_len for n in LENS]
    assert [one.query.shape[1] for one in calls] == [1, 4]
    assert {(one.backend, one.kv_lora_rank, one.qk_rope_head_dim) for one in calls} == {("trtllm-gen", 512, 64)}
    arena.check()


def test_trees_are_refused_at_the_call():
    """A batch with a tree raises an error that names it, because trtllm-gen ignores masks."""
    made = latent(CHAINS, draft=(1, 1, 4))
    arena = Arena.allocate(sizing.buffers(made), "cpu", guard=True)
    backend, buffers = GenLatentBackend(made, arena), BatchBuffers(made, "cpu")
    backend._decode = decode
    batch = buffers.uniform(Mode.VERIFY, 0, 4, 4, Unknown(4, 300), tree=True)
    a = made.attention
    cache = KVCache.latent(torch.zeros(2, a.page_size, a.head_dim, dtype=torch.bfloat16), value_dim=a.value_dim)
    q = torch.zeros(batch.num_rows, a.num_qo_heads, a.head_dim, dtype=torch.bfloat16)
    with pytest.raises(BatchError, match="the tail is a Tree, but trtllm-gen ignores masks"):
        backend.attend(q, cache, batch, torch.empty_like(q[..., : a.value_dim]).contiguous())
