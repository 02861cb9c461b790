"""Tests of write_metadata on the CPU. They decode the written buffers as XQA does and compare with expected values."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, Limits, Mode
from draftmark.arena import Arena
from draftmark.batch import BatchBuffers, Tree, ragged
from draftmark.lengths import Unknown
from draftmark_cuda_triton.heuristics.interpreted import INTERPRETED_ROWS
from draftmark_cuda_trtllm import backend, forms, sizing
from draftmark_cuda_trtllm.backend import XqaBackend

LIMITS = Limits(5, 300, 200, (5,))


@pytest.fixture
def opened(geometry):
    """Return a function that returns (geometry, backend, arena, batch buffers), with lengths and page table filled."""

    def open_(modes, draft, **attention):
        made = geometry(modes, draft=draft, limits=LIMITS, num_qo_heads=4, num_kv_heads=2, head_dim=64, **attention)
        arena = Arena.allocate(sizing.buffers(made), "cpu", guard=True)
        buffers = BatchBuffers(made, "cpu")
        generator = torch.Generator().manual_seed(3)
        buffers.page_table.copy_(torch.randint(1, 90, buffers.page_table.shape, generator=generator))
        buffers.prefix_lens.copy_(torch.tensor([7, 64, 130, 299, 0]))
        buffers.mask.fill_(-1)
        return made, XqaBackend(made, arena), arena, buffers

    return open_


def random_mask(batch, seed):
    """Write a random tree mask to the batch, and return the set of tail slots (draft tokens) that each row sees.

    Each row sees its own slot.
    """
    draw, (q_len, tail_len) = random.Random(seed), (batch.q_lens[0], batch.tail_lens[0])
    rows = []
    for row in range(batch.num_rows):
        own = tail_len - q_len + row % q_len
        rows.append({s for s in range(tail_len) if draw.random() < 0.4} | {own})
        for word in range(batch.tail.mask.shape[1]):
            value = sum(1 << (s % 32) for s in rows[-1] if s // 32 == word)
            batch.tail.mask[row, word] = value - 2**32 if value >= 2**31 else value
    return rows


def kernel_row(arena, geometry, mode, row):
    """Return the tail slots (draft tokens) that row `row` sees, from the mask in XQA's layout.

    The row's uint16 words begin at word ``row · 2 · ceil(q_rows / 32)``.
    """
    stride = 2 * -(-forms.q_rows(geometry, mode) // 32)
    words = arena["tail_mask"].tolist()[row * stride : (row + 1) * stride]
    return {16 * i + bit for i, word in enumerate(words) for bit in range(16) if word >> bit & 1}


@pytest.mark.parametrize(("k", "steps"), [(2, 3), (3, 4), (8, 5), (8, 9), (9, 6), (40, 3)])
def test_draft_step_has_one_lane_per_tail_slot(opened, k, steps):
    """In a draft step each request has T rows in XQA's layout, and its first k mask rows are the batch's.

    T is the number of draft tokens so far (tail slots), k is topk.
    """
    made, backend, arena, buffers = opened(DRAFT_MODES, (k, steps, 4))
    for step in range(steps - 1):
        batch = buffers.uniform(Mode.DRAFT, step, 5, 4, Unknown(4, 300), tree=True)
        sets = random_mask(batch, step)
        arena.poison()
        backend.write_metadata(batch)
        tail = k * (step + 1)
        indptr = arena["row_indptr"].tolist()
        assert indptr == [tail * r for r in range(6)]
        assert arena["kv_lens"].tolist() == [n + tail for n in (7, 64, 130, 299, 0)]
        for number, seen in enumerate(sets):
            assert kernel_row(arena, made, Mode.DRAFT, indptr[number // k] + number % k) == seen
    arena.check()


@pytest.mark.parametrize("nodes", [2, 6, 31, 32, 33, 64, 70])
@pytest.mark.parametrize("tree", [True, False])
def test_verify_masks_match_the_batch(opened, nodes, tree):
    """In VERIFY, XQA's mask rows are the batch's tree mask, or a causal mask for a chain."""
    made, backend, arena, buffers = opened(TARGET_MODES, (8, 12, nodes))
    batch = buffers.uniform(Mode.VERIFY, 0, 5, 4, Unknown(4, 300), tree=tree)
    chain = [set(range(row % nodes + 1)) for row in range(5 * nodes)]
    sets = random_mask(batch, nodes) if isinstance(batch.tail, Tree) else chain
    backend.write_metadata(batch)
    assert arena["row_indptr"].tolist() == [nodes * r for r in range(6)]
    for row, seen in enumerate(sets):
        assert kernel_row(arena, made, Mode.VERIFY, row) == seen
    arena.check()


@pytest.mark.parametrize("rows", [(200,), (64, 64, 64), (1, 63, 0, 65, 3), (0, 128, 0), (5, 0, 0, 0, 0)])
def test_extend_lists_the_row_tiles_of_each_request(opened, rows):
    """The EXTEND schedule lists each request's row tiles, longest KV range first, and every row has its KV slot."""
    made, backend, arena, buffers = opened(TARGET_MODES, (1, 1, 1), page_size=16)
    prefix = [7, 64, 130, 20, 0][: len(rows)]
    buffers.prefix_lens[: len(rows)] = torch.tensor(prefix)
    batch = ragged(
        made, buffers.prefix_lens[: len(rows)], buffers.page_table[: len(rows)], rows, Unknown(len(rows), 300)
    )
    arena.poison()
    backend.write_metadata(batch)
    height = INTERPRETED_ROWS // made.attention.group_size  # rows per tile of cuda_triton's interpreted kernels
    wanted = [[r, tile] for r, n in enumerate(rows) for tile in range(-(-n // height))]
    wanted.sort(key=lambda one: (-prefix[one[0]] - (one[1] + 1) * height, one[0]))
    header = arena["row_tiles"][: forms.SCHEDULE_HEADER_ROWS].tolist()
    tiles = arena["row_tiles"][forms.SCHEDULE_HEADER_ROWS :]
    assert header == [[0, len(wanted)], [made.attention.num_kv_heads, 0]]
    assert tiles[: len(wanted)].tolist() == wanted
    at = [(r, n) for r, count in enumerate(rows) for n in range(prefix[r], prefix[r] + count)]
    slots = [int(buffers.page_table[r, n // 16]) * 16 + n % 16 for r, n in at]
    assert arena["slot_mapping"][: sum(rows)].tolist() == slots
    arena.check()


def test_metadata_is_one_launch(opened, monkeypatch):
    """write_metadata launches one kernel and no torch operator, in every mode."""
    from torch.utils._python_dispatch import TorchDispatchMode

    from draftmark_cuda_triton import prefill
    from draftmark_cuda_trtllm import backend as module

    class Writes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "view" not in str(func) and "slice" not in str(func) and "select" not in str(func):
                operators.append(str(func))
            return func(*args, **(kwargs or {}))

    launches, operators = [], []
    for one in (module, prefill):
        monkeypatch.setattr(one, "record_call", lambda fn, *args, mutates=(): launches.append(fn.__name__))
    made, draft, _, buffers = opened(DRAFT_MODES, (3, 4, 6))
    kinds = ((Mode.DRAFT, 0), (Mode.DRAFT, 2), (Mode.DRAFT_EXTEND, 0))
    batches = [buffers.uniform(mode, step, 5, 4, Unknown(4, 300), tree=mode is Mode.DRAFT) for mode, step in kinds]
    batches.append(ragged(made, buffers.prefix_lens, buffers.page_table, (5, 1, 0, 70, 0), Unknown(5, 300)))
    with Writes():
        for batch in batches:
            draft.write_metadata(batch)
    assert launches == ["write_uniform"] * 3 + ["write_metadata_prefill"]
    assert operators == []


def test_sm_100_metadata_has_lengths_and_their_sums(geometry):
    """For trtllm-gen, EXTEND writes KV lengths and their prefix sums, and VERIFY writes KV lengths.

    A KV length counts committed and new tokens.
    """
    from draftmark import DeviceProfile
    from draftmark_cuda_trtllm.gen import GenBackend

    made = geometry(
        TARGET_MODES, draft=(1, 1, 4), limits=LIMITS, num_qo_heads=4, num_kv_heads=2,
        device=DeviceProfile("cuda", 100, 148),
    )  # fmt: skip
    arena = Arena.allocate(sizing.buffers(made), "cpu", guard=True)
    backend, buffers = GenBackend(made, arena), BatchBuffers(made, "cpu")
    buffers.prefix_lens.copy_(torch.tensor([7, 64, 130, 20, 0]))
    buffers.page_table.copy_(torch.arange(buffers.page_table.numel()).view(5, -1))
    batch = ragged(made, buffers.prefix_lens, buffers.page_table, (5, 1, 0, 70, 0), Unknown(5, 300))
    backend.write_metadata(batch)
    assert arena["kv_lens"].tolist() == [12, 65, 130, 90, 0]
    assert arena["kv_indptr"].tolist() == [0, 12, 77, 207, 297, 297]
    width = buffers.page_table.shape[1]
    new = ((7, 5), (64, 1), (130, 0), (20, 70))
    rows = [(r, position) for r, (first, n) in enumerate(new) for position in range(first, first + n)]
    assert arena["slot_mapping"][:76].tolist() == [(r * width + p // 64) * 64 + p % 64 for r, p in rows]
    backend.write_metadata(buffers.uniform(Mode.VERIFY, 0, 5, 4, Unknown(4, 300), tree=False))
    assert arena["kv_lens"].tolist() == [11, 68, 134, 24, 4]
    arena.check()


def test_kernels_of_cuda_triton_are_prepared_when_the_backend_opens(opened, monkeypatch):
    """Opening prepares cuda_triton's kernels for the modes that XQA does not run, and for no other mode."""
    prepared = []
    monkeypatch.setattr(backend, "prepare", lambda geometry, device: prepared.append((geometry.modes, device.type)))
    opened((Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY), (1, 1, 5))
    opened((Mode.DECODE, Mode.VERIFY), (1, 1, 5))
    assert prepared == [((Mode.EXTEND, Mode.RAGGED_VERIFY), "cpu")]
