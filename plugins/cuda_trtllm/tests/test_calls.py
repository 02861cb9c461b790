"""Tests of the arguments that the backend passes to XQA. On the CPU, a recording function replaces XQA."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, Limits, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers, ragged
from draftmark.cache import KVCache
from draftmark.errors import BatchError
from draftmark.lengths import Unknown
from draftmark_cuda_trtllm import sizing
from draftmark_cuda_trtllm.backend import XqaBackend
from draftmark_cuda_trtllm.xqa import Xqa


@pytest.fixture
def recorded(geometry):
    """Return a function that opens a backend on the CPU. Its XQA writes row numbers as output and records its calls."""

    def open_(modes, draft, **attention):
        made = geometry(
            modes, draft=draft, limits=Limits(4, 300, 200), num_qo_heads=4, num_kv_heads=2, head_dim=64, **attention
        )
        arena, calls = Arena.allocate(sizing.buffers(made), "cpu", guard=True), []
        backend = XqaBackend(made, arena)

        def xqa(q, k, v, table, lens, out, scratch, semaphores, kv_heads, page, **tree):
            calls.append(SimpleNamespace(q=q.clone(), lens=lens, table=table, kv_heads=kv_heads, page=page, **tree))
            out.copy_(torch.arange(out.shape[0]).view(-1, *[1] * (out.dim() - 1)))

        a = made.attention
        rest = a.num_kv_heads, a.page_size, a.window_left + 1, 132, arena["scratch"], arena["semaphores"]
        backend._xqa = Xqa(xqa, *rest)
        buffers = BatchBuffers(made, "cpu")
        buffers.prefix_lens.copy_(torch.tensor([7, 64, 130, 0]))
        return SimpleNamespace(geometry=made, backend=backend, arena=arena, calls=calls, buffers=buffers)

    return open_


def cache_of(made, scales=(None, None)):
    a = made.attention
    pages = torch.zeros(2, 3, a.page_size, a.num_kv_heads, a.head_dim).to(getattr(torch, a.kv_dtype))
    return KVCache(pages[0], pages[1], *scales)


def attend(one, batch, cache=None):
    a = one.geometry.attention
    q = torch.arange(batch.num_rows).view(-1, 1, 1).expand(-1, a.num_qo_heads, a.head_dim).to(torch.bfloat16)
    out = torch.full(q.shape, float("nan"), dtype=torch.bfloat16)
    one.backend.write_metadata(batch)
    one.backend.attend(q, cache or cache_of(one.geometry), batch, out)
    return out[:, 0, 0].tolist()


def test_decode_form_gets_no_mask(recorded):
    """XQA's decode kernel gets neither q_seq_len nor a mask. Its number of SMs is the one that the buffers assume."""
    one = recorded(TARGET_MODES, (1, 1, 1))
    attend(one, one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False))
    (call,) = one.calls
    assert call.q.shape == (4, 1, 4, 64) and call.lens.tolist() == [8, 65, 131, 1]
    assert call.sm_count == 132 and call.sliding_win_size == 0
    assert not hasattr(call, "mask") and not hasattr(call, "q_seq_len")


def test_scales_multiply_as_the_kernel_expects(recorded):
    """XQA gets a q_scale that contains sqrt(head_dim), because XQA divides by it, and k_scale / v_scale with fp8."""
    one = recorded(TARGET_MODES, (1, 1, 1), softmax_scale=0.25)
    batch = one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False)
    attend(one, batch)
    assert one.calls[0].q_scale == pytest.approx(0.25 * 8) and one.calls[0].kv_scale == 1.0

    one = recorded(TARGET_MODES, (1, 1, 1), kv_dtype="float8_e4m3fn", softmax_scale=0.25)
    scales = torch.tensor([0.5]), torch.tensor([2.0])
    attend(one, one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False), cache_of(one.geometry, scales))
    assert one.calls[0].q_scale.item() == pytest.approx(0.25 * 8 * 0.5 / 2.0)
    assert one.calls[0].kv_scale is scales[1]
    assert one.calls[0].q_seq_len == 2 and one.calls[0].q_cu_seq_lens.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("scales", "q_scale", "kv_scale"), [((0.5, None), 0.5, 1.0), ((None, 2.0), 0.5, 2.0)])
def test_scale_of_none_counts_as_one(recorded, scales, q_scale, kv_scale):
    """If only one of k_scale and v_scale is given, the absent scale counts as 1."""
    one = recorded(TARGET_MODES, (1, 1, 1), kv_dtype="float8_e4m3fn", softmax_scale=0.25)
    given = tuple(None if scale is None else torch.tensor([scale]) for scale in scales)
    attend(one, one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False), cache_of(one.geometry, given))
    assert one.calls[0].q_scale.item() == pytest.approx(0.25 * 8 * q_scale)
    assert float(one.calls[0].kv_scale) == kv_scale


def test_window_includes_the_row_itself(recorded):
    """XQA gets the window window_left + 1, because its window includes the row itself."""
    one = recorded(TARGET_MODES, (1, 1, 1), window_left=63)
    attend(one, one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False))
    assert one.calls[0].sliding_win_size == 64


def test_draft_step_stages_its_rows(recorded):
    """A draft step's requests start T rows apart in staging, q_seq_len is k, and outputs are copied back.

    T is the number of draft tokens so far, k is topk.
    """
    one = recorded(DRAFT_MODES, (3, 4, 6))
    for step in range(3):
        out = attend(one, one.buffers.uniform(Mode.DRAFT, step, 4, 3, Unknown(3, 300), tree=True))
        call, tail = one.calls[-1], 3 * (step + 1)
        assert call.q_seq_len == 3 and call.q_cu_seq_lens.tolist() == [tail * r for r in range(5)]
        where = [tail * r + j for r in range(4) for j in range(3)]
        assert call.q[where, 0, 0].tolist() == list(range(12))
        assert out == where


def test_one_request_with_full_blocks_is_not_staged(recorded):
    """Rows of a single request are not staged if they fill a block: 16 rows x 2 heads per KV head = 32."""
    one = recorded(DRAFT_MODES, (16, 3, 6))
    out = attend(one, one.buffers.uniform(Mode.DRAFT, 1, 1, 1, Unknown(1, 300), tree=True))
    assert one.calls[0].q.shape[0] == 16 and one.calls[0].q_cu_seq_lens.tolist() == [0, 32]
    assert out == list(range(16))


def test_extend_runs_cuda_tritons_kernel(recorded):
    """EXTEND runs cuda_triton's kernel in Triton's interpreter, without an XQA call; its output matches float64."""
    one = recorded(TARGET_MODES, (1, 1, 1))
    a, b, cache = one.geometry.attention, one.buffers, cache_of(one.geometry)
    b.page_table.copy_(torch.tensor([1, 2, 0, 0, 0, 0])[: b.page_table.shape[1]].expand_as(b.page_table))
    b.prefix_lens.zero_()
    batch = ragged(one.geometry, b.prefix_lens[:1], b.page_table[:1], (70,), Unknown(1, 300))
    k, v = torch.randn(2, 70, a.num_kv_heads, a.head_dim).to(torch.bfloat16)
    q, out = torch.zeros(2, 70, a.num_qo_heads, a.head_dim, dtype=torch.bfloat16)
    one.backend.write_metadata(batch)
    one.backend.write_kv(k, v, cache, batch)
    one.backend.attend(q, cache, batch, out)
    means = v.double().cumsum(0) / torch.arange(1, 71)[:, None, None]
    wanted = means.repeat_interleave(a.group_size, 1)
    assert ((out.double() - wanted).norm() / wanted.norm()).item() < 4e-3
    assert one.calls == []


def test_extend_with_too_many_requests_raises(recorded):
    """write_metadata raises if an EXTEND batch has more requests than the geometry permits."""
    one = recorded(TARGET_MODES, (1, 1, 1))
    count = one.arena[sizing.ROW_TILES].shape[0] + 1
    prefix, table = torch.zeros(count, dtype=torch.int32), torch.zeros(count, 5, dtype=torch.int32)
    batch = ragged(one.geometry, prefix, table, (1,) * count, Unknown(count, 300))
    with pytest.raises(BatchError, match=f"{count} requests"):
        one.backend.write_metadata(batch)


def test_unsupported_tensors_raise(recorded):
    """attend raises for a strided output and for a pool of more than 2^32 heads."""
    one = recorded(TARGET_MODES, (1, 1, 1))
    batch = one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False)
    q, out = torch.zeros(4, 4, 64, dtype=torch.bfloat16), torch.zeros(4, 64, 4, dtype=torch.bfloat16)
    with pytest.raises(BatchError, match="contiguous"):
        one.backend.attend(q, cache_of(one.geometry), batch, out.transpose(1, 2))
    huge = torch.empty(1 << 26, 64, 2, 64, dtype=torch.bfloat16, device="meta")
    with pytest.raises(BatchError, match="32 bits"):
        one.backend.attend(q, KVCache(huge, huge), batch, torch.zeros_like(q))


def test_attend_on_cpu_raises(recorded):
    """A backend on CPU tensors has no XQA, so attend raises and names CUDA."""
    one = recorded(TARGET_MODES, (1, 1, 1))
    one.backend._xqa = None
    with pytest.raises(BatchError, match="CUDA"):
        attend(one, one.buffers.uniform(Mode.DECODE, 0, 4, 3, Unknown(3, 300), tree=False))


@pytest.mark.parametrize(("draft", "mode"), [((1, 1, 1), Mode.DECODE), ((2, 3, 8), Mode.VERIFY)])
def test_sinks_are_passed_unchanged(recorded, draft, mode):
    """XQA gets the cache's sinks tensor, or None without sinks, with and without a mask; unexpected sinks raise."""
    for sinks in (torch.arange(4.0), None):
        one = recorded(TARGET_MODES, draft, sinks=sinks is not None)
        batch = one.buffers.uniform(mode, 0, 4, 3, Unknown(3, 300), tree=False)
        attend(one, batch, replace(cache_of(one.geometry), sinks=sinks))
        assert one.calls[0].sinks is sinks
    with pytest.raises(BatchError, match="the geometry has no sinks"):
        attend(one, batch, replace(cache_of(one.geometry), sinks=torch.zeros(4)))
