"""Tests of scratch and semaphore sizes against a second implementation of XQA's arithmetic."""

from __future__ import annotations

import math

import pytest

from draftmark import DRAFT_MODES, TARGET_MODES, DeviceProfile, Limits, Mode
from draftmark_cuda_trtllm import contract, forms, sizing

KINDS = ((TARGET_MODES, (8, 5, 64)), (DRAFT_MODES, (8, 5, 64)), (DRAFT_MODES, (8, 9, 3)), (TARGET_MODES, (1, 1, 1)))


def sizes(geometry):
    return {spec.name: spec.nbytes for spec in sizing.buffers(geometry)}


def xqa_scratch(sms, batch, kv_heads, group, dim, max_len, rows):
    """Return (bytes of scratch, semaphores) as `launchMHAFlashInfer` and `kernel_mha_impl` of xqa/mha.cu use them."""
    parts = min(max(1, sms // (batch * kv_heads)), math.ceil(max_len / 256))
    blocks = 1 if rows == 1 else math.ceil(rows * group / 32)
    if parts == 1:
        return 0, 0
    sequences = kv_heads * blocks * batch
    row_max = 128  # XQA's statistics of a block of up to 32 rows: float data[1][8][4], 128 bytes
    record = (group if rows == 1 else 32) * next(n for n in (64, 128, 256) if n >= dim) * 2
    offset = 2 * row_max * parts * sequences
    return math.ceil(offset / record) * record + parts * sequences * record, sequences


@pytest.mark.parametrize("sms", [4, 66, 132, 170])
@pytest.mark.parametrize(("modes", "draft"), KINDS)
@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (28, 4), (32, 1), (9, 3)])
def test_scratch_and_semaphores_cover_every_batch(geometry, sms, modes, draft, heads):
    """Declared scratch and semaphores are large enough for any number of requests in every mode that XQA runs."""
    from dataclasses import replace

    made = geometry(modes, draft=draft, num_qo_heads=heads[0], num_kv_heads=heads[1])
    made = replace(made, device=replace(made.device, num_sms=sms))
    declared, a = sizes(made), made.attention
    width = made.max_pages_per_req * a.page_size
    for mode in forms.uniform_modes(made):
        rows = 1 if made.extent(mode).q_len == 1 else forms.q_rows(made, mode)
        for batch in range(1, made.max_reqs + 1):
            scratch, counters = xqa_scratch(sms, batch, a.num_kv_heads, a.group_size, a.head_dim, width, rows)
            assert scratch <= declared["scratch"], (mode, batch)
            assert counters * 4 <= declared["semaphores"], (mode, batch)


def test_declared_scratch_is_tight(geometry):
    """Scratch is hardly larger than necessary: one request of 64 rows uses over 96 % of it."""
    made = geometry()
    scratch, _ = xqa_scratch(132, 1, 8, 4, 128, made.max_pages_per_req * 64, 64)
    assert 0.96 * sizes(made)["scratch"] < scratch <= sizes(made)["scratch"] < 9 << 20


def test_graph_state_of_a_target_is_small(geometry):
    """All buffers for 256 requests, context 131072 and 64 draft tokens take under 16 MiB (engines reserve 128 MiB)."""
    assert sum(sizes(geometry(TARGET_MODES)).values()) < 16 << 20


def test_only_drafts_with_padding_rows_are_staged(geometry):
    """There are no staging buffers for chains and for drafts with one forward, which need no padding rows."""
    assert "staged_queries" in sizes(geometry(DRAFT_MODES))
    for draft in ((1, 5, 64), (8, 2, 64), (8, 1, 64)):
        assert "staged_queries" not in sizes(geometry(DRAFT_MODES, draft=draft))
    assert "staged_queries" not in sizes(geometry(TARGET_MODES))


@pytest.mark.parametrize("k", [2, 3, 8, 9, 40])
@pytest.mark.parametrize("steps", range(2, 14))
def test_mask_row_holds_tail_and_grid_holds_rows(geometry, k, steps):
    """In draft steps, a mask row has a bit for each draft token so far, and XQA's grid covers all topk rows."""
    made = geometry(DRAFT_MODES, draft=(k, steps, 3))
    rows = forms.q_rows(made, Mode.DRAFT)
    assert 32 * forms.mask_words(made, Mode.DRAFT) >= k * (steps - 1)
    assert rows >= k
    if k * (steps - 1) <= 32:
        assert rows == k


@pytest.mark.parametrize("draft", [(1, 1, 1), (1, 70, 2), (8, 2, 32), (8, 5, 33), (8, 9, 64), (40, 2, 65), (3, 12, 99)])
def test_mask_row_has_the_kernels_stride(geometry, draft):
    """mask_words equals ceil(q_rows / 32), the stride that XQA derives from q_rows."""
    for made in (geometry(DRAFT_MODES, draft=draft), geometry(TARGET_MODES, draft=draft)):
        for mode in forms.uniform_modes(made):
            assert forms.mask_words(made, mode) == math.ceil(forms.q_rows(made, mode) / 32), mode


def test_one_tree_kernel_serves_every_draft_step(geometry):
    """All draft steps run one XQA kernel, and DRAFT_EXTEND runs a second one; EXTEND runs none."""
    assert forms.kernels(geometry(DRAFT_MODES, draft=(8, 5, 16))) == [8, 16]
    assert forms.kernels(geometry(TARGET_MODES, draft=(8, 5, 64))) == [1, 64]
    assert forms.kernels(geometry(DRAFT_MODES, draft=(1, 5, 16))) == [1, 16]
    assert forms.kernels(geometry((Mode.EXTEND,))) == []


def test_extend_only_geometry_needs_no_scratch(geometry):
    """A geometry that has only the mode EXTEND gets the buffers of slots and row tiles, and no scratch."""
    assert set(sizes(geometry((Mode.EXTEND,)))) == {"slot_mapping", "row_tiles"}


@pytest.mark.parametrize("heads", [(32, 8), (8, 8), (28, 4), (32, 1), (9, 3)])
@pytest.mark.parametrize("extend", [1, 15, 16, 17, 200, 8192])
def test_row_tiles_fit_cuda_tritons_schedule(geometry, heads, extend):
    """The row-tile buffer is large enough for cuda_triton's schedule, and both plugins have equal tile constants."""
    from draftmark_cuda_triton.heuristics import common, select

    made = geometry(num_qo_heads=heads[0], num_kv_heads=heads[1], limits=Limits(7, 131072, extend, (7,)))
    config = select.select_config(made.attention, made.device, made.extent(Mode.EXTEND).q_len)
    needed = common.max_row_tiles(config, made.attention.group_size, extend, made.max_reqs)
    assert (forms.SCHEDULE_HEADER_ROWS + needed) * 8 <= sizes(made)["row_tiles"]
    assert forms.SCHEDULE_HEADER_ROWS == common.SCHEDULE_HEADER_ROWS
    assert forms.LEAST_TILE_ROWS == common.MIN_BLOCK_M <= config.block_m


def test_fp8_cache_never_uses_the_decode_form(geometry):
    """With an fp8 cache XQA's decode kernel never runs, because on sm_90 FlashInfer's would round queries to fp8."""
    assert 1 not in forms.kernels(geometry(kv_dtype="float8_e4m3fn", draft=(1, 1, 1)))


def test_xqas_modes_declare_their_bound(geometry):
    """Outputs of XQA may differ by 5 unit roundoffs; those of cuda_triton's kernels and of trtllm-gen by 3."""
    every = tuple(mode for mode in Mode if mode is not Mode.DRAFT_BLOCK)
    xqa = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND)
    bounds = {mode: contract.roundoffs(geometry(modes=every), mode) for mode in every}
    assert bounds == {mode: 5 if mode in xqa else 3 for mode in every}
    on_gen = geometry(modes=every, device=DeviceProfile("cuda", 100, 148))
    assert {contract.roundoffs(on_gen, mode) for mode in every} == {3}
