"""`starting.Again`: a layer's launches are those of the layer before it, at its own addresses."""

from __future__ import annotations

import gc
import random
import weakref

import pytest
import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.lengths import Unknown
from draftmark.runtime import KVCache
from draftmark_cuda_triton import boxes, extend, few_rows, launch, sizing, writing

REQS, HEADS = 3, (8, 2)


class OnGpu(torch.Tensor):
    """A tensor of the CPU that says it is a GPU's."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def made(*shape, dtype=torch.bfloat16, odd=False):
    """A new tensor, at an address that is no multiple of 16 bytes if `odd`."""
    count = torch.Size(shape).numel()
    return seen(torch.zeros(count + 8, dtype=dtype)[4 * odd :][:count].view(shape))


def seen(view):
    """A view of a GPU's tensor is a GPU's."""
    return view.as_subclass(OnGpu)


class Layers:
    """One backend's attention, and batches and layers for it.

    Args:
        mode: of all batches. page: its size. fp8: of the KV.
    """

    def __init__(self, mode, page, fp8=False, sinks=False):
        dtype = "float8_e4m3fn" if fp8 else "bfloat16"
        self.mode, self.page, self.kv_dtype, self.has_sinks = mode, page, getattr(torch, dtype), sinks
        shape = AttentionShape(*HEADS, 128, page, kv_dtype=dtype, sinks=sinks)
        self.q_len = {Mode.DECODE: 1, Mode.EXTEND: 20}.get(mode, 8)
        limits, device = Limits(8, 4096, 256), DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(shape, limits, DraftShape(4, 3, 8), device, (mode,))
        slots = made(int(geometry.max_rows_any), dtype=torch.int64)
        if mode is Mode.EXTEND:
            self.served = extend.Extend(geometry, slots, made(999, 2, dtype=torch.int32))
        else:
            specs = sizing.few_rows_buffers(geometry, [mode])
            own = {one.name: made(*map(int, one.shape), dtype=getattr(torch, one.dtype)) for one in specs}
            self.served = few_rows.FewRows(geometry, slots, own)
        self.words = geometry.mask_words

    def batch(self, chance):
        """Requests, page tables of some width, and chains or trees, at new addresses."""
        count = chance.choice((2, REQS))
        rows, q_len = count * self.q_len, self.q_len
        tail = Causal()
        if self.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) and chance.random() < 0.6:
            depth = (rows,) if self.mode is Mode.RAGGED_VERIFY else (count, q_len)
            mask = made(rows, self.words, dtype=torch.int32, odd=chance.random() < 0.2)
            tail = Tree(mask, made(*depth, dtype=torch.int32))
        return ForwardBatch(
            self.mode, 0, made(count, dtype=torch.int32), made(count + 1, dtype=torch.int32),
            made(count, chance.choice((300, 4096)), dtype=torch.int32), tail, made(rows, dtype=torch.int64),
            Unknown(count, 4000), count, (q_len,) * count, (q_len,) * count, rows, None,
        )  # fmt: skip

    def layer(self, chance):
        """A cache: contiguous, or K and V in one page, and of one of two sizes."""
        pages, shape = chance.choice((4, 6)), (self.page, HEADS[1], 128)
        if chance.random() < 0.3:
            k, v = map(seen, made(pages, 2, *shape, dtype=self.kv_dtype).unbind(1))
        else:
            k, v = (made(pages, *shape, dtype=self.kv_dtype) for _ in range(2))
        scales = [made(1, dtype=torch.float32, odd=chance.random() < 0.2) for _ in range(2)]
        if self.kv_dtype is torch.bfloat16 or chance.random() < 0.2:
            scales = [None, None]
        elif chance.random() < 0.3:
            scales[1] = scales[0]
        return KVCache(k, v, *scales, made(HEADS[0], dtype=torch.float32) if self.has_sinks else None)

    def rows(self, batch, chance):
        """q and out; q may be a part of wider rows."""
        wide = made(batch.num_rows, HEADS[0] + 2 * HEADS[1], 128)
        q = seen(wide[:, : HEADS[0]]) if chance.random() < 0.5 else made(batch.num_rows, HEADS[0], 128)
        return q, made(batch.num_rows, HEADS[0], 128)


def plain(value):
    """What a kernel gets: addresses for tensors, and what a box is made of for descriptors."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if hasattr(value, "block_shape"):
        base = value.base
        return base.data_ptr(), base.dtype, *value.shape, *value.strides, *value.block_shape
    return value


def launched(gpu, call, *args):
    """Kernels, grids and arguments that ``call(*args)`` launches."""
    before = len(gpu.launched)
    call(*args)
    # Behind the grid come stream, function and hooks.
    return [(source, [plain(one) for one in (*given[:3], *given[9:])]) for source, given in gpu.launched[before:]]


CASES = [
    (Mode.DECODE, 16, False, False),
    (Mode.VERIFY, 16, False, True),
    (Mode.VERIFY, 16, True, False),
    (Mode.RAGGED_VERIFY, 1, False, False),
    (Mode.RAGGED_VERIFY, 64, False, False),
    (Mode.EXTEND, 16, False, True),
    (Mode.EXTEND, 1, False, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0].name}-p{c[1]}{'-fp8' * c[2]}{'-sinks' * c[3]}")
def test_launches_are_those_that_would_be_made_anew(compiled, monkeypatch, case):
    """Of layers and batches that differ in addresses, pitches, alignment, sizes and what is not there, in any order."""
    chance, layers = random.Random(1), Layers(*case)
    batches = [layers.batch(chance) for _ in range(6)]
    caches = [layers.layer(chance) for _ in range(5)]
    asked = []
    for _ in range(30):
        batch = chance.choice(batches)
        q, out = layers.rows(batch, chance)
        asked.append((q, chance.choice(caches), batch, out))
    again = [launched(compiled, layers.served.attend, *one) for one in asked]
    monkeypatch.setattr(type(layers.served._again), "__call__", lambda _, layout, tensors, launch, *args: launch(*args))
    for one, found in zip(asked, again, strict=True):
        assert found and found == launched(compiled, layers.served.attend, *one)


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_are_written_as_they_would_be_anew(compiled, monkeypatch, fp8):
    """Rows of K and V that are parts of one projection or not, to layers as above; scales that are there and not."""
    chance, layers = random.Random(5), Layers(Mode.DECODE, 16, fp8)
    caches, asked = [layers.layer(chance) for _ in range(6)], []
    for _ in range(40):
        cache, count = chance.choice(caches), chance.choice((1, 3, 16))
        qkv = made(count, HEADS[0] + 2 * HEADS[1], 128)
        k, v = (seen(one) for one in qkv[:, HEADS[0] :].split(HEADS[1], 1))
        if chance.random() < 0.4:
            k, v = (made(count, HEADS[1], 128, odd=chance.random() < 0.2) for _ in "kv")
        slots = made(count, dtype=torch.int64)
        asked.append((k, v, cache.k, cache.v, cache.k_scale, cache.v_scale, slots))
    again = [launched(compiled, writing.write_kv, *one) for one in asked]
    assert again == [launched(compiled, writing._launch, *one) for one in asked]
    monkeypatch.setattr(writing, "_launch", lambda *_: pytest.fail("worked out anew"))
    assert again == [launched(compiled, writing.write_kv, *one) for one in asked]


def test_a_like_layer_costs_no_look_at_its_arguments(compiled, monkeypatch):
    """Of a second layer of the same layout nothing is bound, described or worked out."""
    chance, layers = random.Random(2), Layers(Mode.VERIFY, 16)
    batch = layers.batch(chance)
    first, second = ([made(4, 16, HEADS[1], 128) for _ in range(2)] for _ in range(2))
    q, out = layers.rows(batch, chance)
    layers.served.attend(q, KVCache(*first), batch, out)
    monkeypatch.setattr(launch, "attend", lambda *_: pytest.fail("worked out anew"))
    monkeypatch.setattr(boxes, "describe", lambda *_: pytest.fail("described anew"))
    given = launched(compiled, layers.served.attend, q, KVCache(*second), batch, out)
    assert [source.fn.__name__ for source, _ in given] == ["attend_uniform", "merge_pieces"]
    boxed = [one[0] for one in given[0][1] if isinstance(one, tuple) and torch.bfloat16 in one]
    assert boxed == [plain(one) for one in second]


def test_a_tensor_that_was_given_other_memory_is_read_there(compiled):
    """An address is asked for at every launch, of caches too, whatever objects they are in."""
    chance, layers = random.Random(4), Layers(Mode.DECODE, 16)
    batch, cache, other = layers.batch(chance), *(KVCache(*(made(4, 16, HEADS[1], 128) for _ in "kv")) for _ in "ab")
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.served.attend(q, cache, batch, out)
    for one, new in ((cache.k, other.k), (cache.v, other.v)):
        one.set_(new)
    moved = launched(compiled, layers.served.attend, q, cache, batch, out)
    assert moved == launched(compiled, layers.served.attend, q, other, batch, out)


@pytest.mark.parametrize("mode", [Mode.DECODE, Mode.EXTEND])
def test_no_tensor_is_kept(compiled, mode):
    """What is remembered of a launch are numbers: the caller's memory goes when the caller lets it go."""
    chance, layers = random.Random(3), Layers(mode, 16)
    batch, cache = layers.batch(chance), layers.layer(chance)
    q, out = layers.rows(batch, chance)
    for _ in range(2):
        layers.served.attend(q, cache, batch, out)
    kept = [weakref.ref(one.untyped_storage()) for one in (cache.k, cache.v, q, out, batch.page_table)]
    compiled.launched.clear()
    del batch, cache, q, out
    gc.collect()
    assert [one() is None for one in kept] == [True] * 5
