"""Tests of latent rows (MLA): refusals on the CPU; numbers, graphs and operator rules on the emulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Form, Geometry, Limits, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers, ragged
from draftmark.cache import KVCache
from draftmark.geometry import DRAFT_MODES, TARGET_MODES
from draftmark.graphs import GraphKey, Program
from draftmark.lengths import Exact
from draftmark_ascend_npu import sizing
from draftmark_ascend_npu.latent import AscendLatentBackend
from draftmark_ascend_npu.support import reasons_against
from draftmark_testing.latent_rows import assert_latent_row, slots_at

SCALE = 192**-0.5
LENS = (0, 127, 128, 300)


def latent(modes=TARGET_MODES, *, draft=(3, 3, 6), extend=64, forms=(Form.LATENT_PARTS,), **attention):
    shape = {"num_qo_heads": 5, "head_dim": 576, "value_dim": 512, "page_size": 128, **attention}
    shape = AttentionShape(num_kv_heads=1, latent=True, softmax_scale=SCALE, **shape)
    limits = Limits(4, 300, extend, (1, 4))
    return Geometry.create(shape, limits, DraftShape(*draft), modes=modes, forms=forms)


REFUSALS = {
    "rows": ({"head_dim": 320, "value_dim": 256}, "latent rows of 256+64 elements"),
    "rest": ({"head_dim": 544}, "latent rows of 512+32 elements"),
    "one-buffer": ({"forms": ()}, "add Form.LATENT_PARTS"),
    "page": ({"page_size": 64}, "page_size 64 is not served for latent rows"),
    "heads": ({"num_qo_heads": 160}, "num_qo_heads 160"),
    "verify": ({"draft": (3, 3, 17)}, "17 rows of a request in mode verify"),
    "extend": ({"extend": 1 << 16}, "4100 pieces of 16 rows in mode extend"),
    "fp8": ({"kv_dtype": "float8_e4m3fn"}, "kv_dtype float8_e4m3fn"),
    "window": ({"window_left": 64}, "window_left 64"),
    "cap": ({"logits_soft_cap": 30.0}, "logits_soft_cap 30.0"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_value(name):
    """Each unsupported latent geometry is refused with one reason, which has the value and the limit."""
    fields, expected = REFUSALS[name]
    reasons = reasons_against(latent(**fields))
    assert any(expected in reason for reason in reasons), reasons


@pytest.mark.parametrize("heads", [1, 5, 12, 20, 96, 128])
def test_heads_are_padded_to_a_power_of_two(heads):
    """Any number of heads up to 128 is served. The staging buffers have the next power of two of heads."""
    geometry = latent(num_qo_heads=heads)
    assert reasons_against(geometry) == []
    [queries] = [spec for spec in sizing.buffers(geometry) if spec.name == sizing.QUERIES]
    assert queries.shape == (geometry.max_rows_any, 1 << (heads - 1).bit_length(), 512)


def trees(geometry, batch, dice):
    """Write random trees into the batch's masks and depths; return for each row the tail slots that it sees."""
    q, tail, seen = batch.q_lens[0], batch.tail_lens[0], []
    words = torch.zeros(batch.tail.mask.shape, dtype=torch.int64)
    depth = torch.zeros(batch.tail.depth.shape, dtype=torch.int32)
    for r in range(batch.padded_reqs):
        above = []
        for slot in range(tail):
            parent = -1 if (slot < q and batch.mode is Mode.DRAFT) or slot == 0 else dice.randrange(slot)
            above.append([*(above[parent] if parent >= 0 else []), slot])
            depth[r, slot] = len(above[slot]) - 1
        for row in range(q):
            mine = above[tail - q + row]
            seen.append(mine)
            for slot in mine:
                words[r * q + row, slot // 32] |= 1 << (slot % 32)
    batch.tail.mask.copy_(words.to(torch.int32))
    batch.tail.depth.copy_(depth)
    return seen


def staged(geometry, mode, step=0, tree=True, lens=LENS):
    """Return (batch on the NPU, tail slots that each row sees, cache with random rows)."""
    a, buffers, dice = geometry.attention, BatchBuffers(geometry, "npu"), random.Random(step)
    width = buffers.page_table.shape[1]
    table = 1 + torch.randperm(4 * width, generator=torch.Generator().manual_seed(7)).view(4, width)
    buffers.page_table[:4] = table.int().npu()
    buffers.prefix_lens[:4] = torch.tensor(lens, dtype=torch.int32).npu()
    rows = torch.randn(4 * width + 1, a.page_size, a.head_dim, generator=torch.Generator().manual_seed(8)).bfloat16()
    cache = KVCache.latent((rows[..., :512].contiguous().npu(), rows[..., 512:].contiguous().npu()))
    if mode is Mode.EXTEND:
        counts = (17, 0, 32, 1)
        batch = ragged(geometry, buffers.prefix_lens[:4], buffers.page_table[:4], counts, Exact(lens))
        return batch, [list(range(j + 1)) for n in counts for j in range(n)], cache
    batch = buffers.uniform(mode, step, 4, 4, Exact(lens), tree=tree and mode is not Mode.DECODE)
    q, tail = batch.q_lens[0], batch.tail_lens[0]
    if hasattr(batch.tail, "mask"):
        return batch, trees(geometry, batch, dice), cache
    return batch, [list(range(tail - q + j + 1)) for _ in range(4) for j in range(q)], cache


def forward(backend, batch, cache, seed=0):
    """Return (step that runs one forward, its queries, its output)."""
    a, dice = backend.geometry.attention, torch.Generator().manual_seed(seed)
    k = torch.randn(batch.num_rows, 1, a.head_dim, generator=dice).bfloat16().npu()
    q = torch.randn(batch.num_rows, a.num_qo_heads, a.head_dim, generator=dice).bfloat16().npu()
    out = torch.full((batch.num_rows, a.num_qo_heads, 512), float("nan"), dtype=torch.bfloat16).npu()

    def run():
        backend.write_metadata(batch)
        backend.write_kv(k, None, cache, batch)
        backend.attend(q, cache, batch, out)

    return run, q, out


def check(batch, seen, cache, q, out, lens=LENS):
    """Compare every row with attention in float64 over its prefix and its tail slots."""
    rows = torch.cat([part.cpu() for part in cache.parts], -1).flatten(0, 1)
    q, out, number = q.cpu(), out.cpu(), 0
    for r, length in enumerate(lens):
        for _ in range(batch.q_lens[r]):
            at = torch.tensor([*range(length), *(length + slot for slot in seen[number])])
            keys = rows[slots_at(batch, r, at, 128)]
            assert_latent_row(q[number], keys, 512, SCALE, out[number], about=(batch.mode, r, number))
            number += 1


FORWARDS = [
    (TARGET_MODES, Mode.DECODE, 0), (TARGET_MODES, Mode.VERIFY, 0), (TARGET_MODES, Mode.EXTEND, 0),
    (DRAFT_MODES, Mode.DRAFT, 0), (DRAFT_MODES, Mode.DRAFT, 1), (DRAFT_MODES, Mode.DRAFT_EXTEND, 0),
]  # fmt: skip


def opened(geometry):
    arena = Arena.allocate(sizing.buffers(geometry), "npu", guard=True)
    return AscendLatentBackend(geometry, arena), arena


@pytest.mark.device
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize(("modes", "mode", "step"), FORWARDS)
def test_every_forward_equals_float64(heads, modes, mode, step):
    """Decode, prompts of 0 to 32 rows, chains and trees equal float64, at prefixes around a page's end."""
    for tree in (True, False) if mode is Mode.VERIFY else (mode is Mode.DRAFT,):
        geometry = latent(modes, num_qo_heads=heads)
        backend, arena = opened(geometry)
        batch, seen, cache = staged(geometry, mode, step, tree)
        run, q, out = forward(backend, batch, cache)
        backend.plan(batch)
        run()
        check(batch, seen, cache, q, out)
        arena.check()


@pytest.mark.device
@pytest.mark.parametrize("tree", [True, False])
def test_replay_follows_new_lengths(tree):
    """A captured verification is right at other lengths, since the call in its graph gets new lists."""
    from draftmark_ascend_npu.graph import NpuGraphState

    geometry = latent()
    backend, _ = opened(geometry)
    batch, seen, cache = staged(geometry, Mode.VERIFY, 0, tree)
    run, q, out = forward(backend, batch, cache)
    state, key = NpuGraphState("npu"), GraphKey(Program.VERIFY, 4)
    backend.plan(batch)
    state.capture(key, run)
    for lens in (LENS, (5, 255, 256, 1)):
        batch.prefix_lens.copy_(torch.tensor(lens, dtype=torch.int32).npu())
        backend.plan(replace(batch, host=Exact(lens)))
        out.fill_(float("nan"))
        state.replay(key)
        torch.npu.synchronize()
        check(batch, seen, cache, q, out, lens)


@pytest.mark.device
@pytest.mark.parametrize(("heads", "rows", "expected"), [(20, 4, "power of two"), (16, 17, "at most 16")])
def test_forbidden_calls_raise_before_the_operator(heads, rows, expected):
    """A call with 20 heads, or with 17 rows of a request, raises and names the rule."""
    from draftmark_ascend_npu.ops import PagedAttention
    from draftmark_ascend_npu.rules import OperatorRule

    q, rest = (torch.zeros(rows, heads, width, dtype=torch.bfloat16, device="npu") for width in (512, 64))
    values, rests = (torch.zeros(2, 128, 1, width, dtype=torch.bfloat16, device="npu") for width in (512, 64))
    tables = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    none = torch.empty(1, device="npu")
    call = PagedAttention(q, values, values, tables, None, SCALE, torch.empty_like(q), none, rest, rests)
    with pytest.raises(OperatorRule, match=expected):
        call.launch([rows], [100])


@pytest.mark.device
@pytest.mark.parametrize("heads", [20, 16])
def test_emulator_rejects_what_the_operator_rejects(emulated, monkeypatch, heads):
    """Without the plugin's own checks, the emulated operator rejects 20 heads and 17 rows of a request."""
    from draftmark_ascend_npu import ops

    for name in ("check_latent", "check_latent_rows"):
        monkeypatch.setattr(ops.rules, name, lambda *given: None)
    rows = 4 if heads == 20 else 17
    q, rest = (torch.zeros(rows, heads, width, dtype=torch.bfloat16, device="npu") for width in (512, 64))
    values, rests = (torch.zeros(2, 128, 1, width, dtype=torch.bfloat16, device="npu") for width in (512, 64))
    tables = torch.zeros(1, 1, dtype=torch.int32, device="npu")
    call = ops.PagedAttention(
        q, values, values, tables, None, SCALE, torch.empty_like(q), torch.empty(1, device="npu"), rest, rests
    )
    with pytest.raises(RuntimeError, match=r"power of two|takes 16 of latent rows"):
        call.launch([rows], [100])
        torch.npu.synchronize()


def test_buffers_are_sized_by_rows_and_padded_heads():
    """No latent buffer grows with the context, and the parts have the widths of the operator."""
    for heads in (5, 20):
        specs = {spec.name: spec for spec in sizing.buffers(latent(num_qo_heads=heads))}
        count = 1 << (heads - 1).bit_length()
        assert specs[sizing.QUERY_RESTS].shape == (64, count, 64)
        assert specs[sizing.LSES].shape == (4 * 6, count, 1)
        assert sizing.TAIL_KV not in specs
