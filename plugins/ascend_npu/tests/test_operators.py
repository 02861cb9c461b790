"""Tests of torch_npu's operators against the contract's float64 attention, without code of the plugin.

On the emulator they test the emulator. On hardware they test that each operator behaves as its page states.
"""

import pytest
import torch

from draftmark import AttentionShape
from draftmark_contract.oracle.attention import attend, tolerance

pytestmark = pytest.mark.device
HEADS, KV_HEADS, DIM, BLOCK = 8, 2, 128, 128
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}


@pytest.fixture
def library():
    import torch_npu

    return torch_npu


def problem(dtype, rows, blocks=6, seed=0):
    dice = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, HEADS, DIM, generator=dice).to(dtype) * 0.5
    k, v = (torch.randn(blocks, BLOCK, KV_HEADS, DIM, generator=dice).to(dtype) for _ in range(2))
    return q, k, v


def close(out, lse, q, k, v, visible, scale):
    """Check outputs against float64 within the contract's tolerance, and the natural log-sum-exp if there is one."""
    order = [(0, row) for row in range(len(q))]
    shape = AttentionShape(HEADS, KV_HEADS, DIM, BLOCK, softmax_scale=scale)
    pools = [pool.reshape(-1, KV_HEADS, DIM) for pool in (k, v)]
    answer = attend(q, *pools, {(0, row): tuple(slots) for row, slots in enumerate(visible)}, order, shape)
    assert ((out.cpu().double() - answer.out).abs() <= tolerance(answer, NAMES[q.dtype], shape)).all()
    for row, slots in enumerate(visible if lse is not None else ()):
        keys = pools[0][list(slots)].double().repeat_interleave(HEADS // KV_HEADS, 1)
        exact = torch.einsum("hd,shd->hs", q[row].double(), keys).mul(scale).logsumexp(-1)
        assert (lse[row].cpu().double().view(-1) - exact).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("causal", [True, False])
def test_fused_attention_over_pages(library, dtype, causal):
    """In TND (tokens, heads, dim) the fused operator's output is right over shuffled pages, causal or unmasked."""
    q, k, v = problem(dtype, 6)
    table, rows, keys = torch.tensor([[4, 2, 0], [1, 5, 3]], dtype=torch.int32), [4, 6], [300, 129]
    mask = torch.ones(2048, 2048, dtype=torch.int8).triu(1).npu() if causal else None
    out, lse = library.npu_fused_infer_attention_score(
        q.npu(), k.flatten(2).npu(), v.flatten(2).npu(), atten_mask=mask, actual_seq_lengths=rows,
        actual_seq_lengths_kv=keys, block_table=table.npu(), num_heads=HEADS, num_key_value_heads=KV_HEADS, scale=0.07,
        input_layout="TND", sparse_mode=3 if causal else 0, block_size=BLOCK, softmax_lse_flag=True,
    )  # fmt: skip
    visible, first = [], 0
    for ids, last, length in zip(table.tolist(), rows, keys, strict=True):
        slots = [ids[i // BLOCK] * BLOCK + i % BLOCK for i in range(length)]
        visible += [slots[: length - (last - row - 1) * causal] for row in range(first, last)]
        first = last
    assert lse.shape == (6, HEADS, 1)
    close(out, lse, q, k, v, visible, 0.07)


@pytest.mark.parametrize("dtype", list(NAMES))
def test_fused_attention_with_a_dense_mask(library, dtype):
    """In BSND (batch, rows, heads, dim) the fused operator's output is right with a dense mask; 1 hides a key."""
    q, k, v = problem(dtype, 6, blocks=1)
    k, v = (one.view(-1, KV_HEADS, DIM)[:10] for one in (k, v))
    mask = (torch.rand(2, 1, 3, 5, generator=torch.Generator().manual_seed(1)) < 0.5).to(torch.int8)
    mask[..., 0] = 0
    batched = (one.reshape(2, -1, *one.shape[1:]).npu() for one in (q, k, v))
    out, lse = library.npu_fused_infer_attention_score(
        *batched, atten_mask=mask.npu(), num_heads=HEADS, num_key_value_heads=KV_HEADS, scale=0.1, input_layout="BSND",
        sparse_mode=0, softmax_lse_flag=True,
    )  # fmt: skip
    visible = [[5 * n + i for i in range(5) if not mask[n, 0, row, i]] for n in range(2) for row in range(3)]
    assert lse.shape == (2, HEADS, 3, 1)
    close(out.view(6, HEADS, DIM), lse.transpose(1, 2).reshape(6, HEADS), q, k, v, visible, 0.1)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_scatter_stores_each_row_at_its_slot(library, slot_dtype):
    """With cache_mode Norm, and int32 or int64 slots, rows are stored at their slots and other slots are unchanged."""
    _, k, v = problem(torch.float16, 1)
    rows = [torch.randn(4, KV_HEADS, DIM).half() for _ in range(2)]
    slots = torch.tensor([700, 0, 129, 130], dtype=slot_dtype)
    caches = k.npu(), v.npu()
    library.npu_scatter_pa_kv_cache(*(one.npu() for one in rows), *caches, slots.npu(), cache_mode="Norm")
    for pool, cache, one in zip((k, v), caches, rows, strict=True):
        want = pool.flatten(0, 1).clone()
        want[slots.long()] = one
        assert torch.equal(cache.cpu().flatten(0, 1), want)
