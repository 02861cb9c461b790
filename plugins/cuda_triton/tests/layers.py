"""Attention implementations on fake GPU tensors, and random batches and layers for them."""

from __future__ import annotations

import mmap
import random
from typing import Any

import torch

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.lengths import Unknown, UpperBound
from draftmark.runtime import KVCache
from draftmark_cuda_triton import decode_verify, prefill, prefill_fp8, sizing

LAYER_REQS, HEADS = 3, (8, 2)


class GpuTensor(torch.Tensor):
    """CPU tensor with is_cuda = True."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def new_tensor(*shape, dtype=torch.bfloat16, odd=False):
    """Return a new fake GPU tensor of zeros; with `odd` its address is not a multiple of 16 bytes.

    Its memory is mapped, because some Pythons have their heap below 2³², where no GPU has memory.
    """
    count = torch.Size(shape).numel()
    memory = torch.frombuffer(mmap.mmap(-1, (count + 8) * dtype.itemsize), dtype=torch.uint8)
    return as_gpu(memory.view(dtype)[4 * odd :][:count].view(shape))


def as_gpu(view):
    """Return the view as a fake GPU tensor."""
    return view.as_subclass(GpuTensor)


class Layers:
    """Holds one attention implementation on fake GPU tensors, and draws random batches and layers for it.

    Args:
        mode: mode of every batch.
        page: page size in tokens.
        fp8: e4m3 KV cache instead of bfloat16.
        sinks: attention sinks in every layer.
    """

    def __init__(self, mode, page, fp8=False, sinks=False):
        dtype = "float8_e4m3fn" if fp8 else "bfloat16"
        self.mode, self.page, self.kv_dtype, self.has_sinks = mode, page, getattr(torch, dtype), sinks
        shape = AttentionShape(*HEADS, 128, page, kv_dtype=dtype, sinks=sinks)
        self.q_len = {Mode.DECODE: 1, Mode.EXTEND: 20}.get(mode, 8)
        limits, device = Limits(8, 4096, 256), DeviceProfile("cuda", 90, 132)
        geometry = Geometry.create(shape, limits, DraftShape(4, 3, 8), device, (mode,))
        slots = new_tensor(int(geometry.max_rows_any), dtype=torch.int64)
        is_prefill = mode is Mode.EXTEND
        specs = sizing.split_buffers(geometry, [] if is_prefill else [mode], is_prefill)
        specs += sizing.upcast_buffers(geometry) if is_prefill else []
        own = {one.name: new_tensor(*map(int, one.shape), dtype=getattr(torch, one.dtype)) for one in specs}
        if is_prefill:
            tiles = new_tensor(999, 2, dtype=torch.int32)
            if fp8:
                self.attention = prefill_fp8.PrefillFp8(geometry, slots, tiles, own)
            else:
                # Only layers with pages of 16 get split buffers, so that tests cover Prefill with and without splits.
                self.attention = prefill.Prefill(geometry, slots, tiles, own if page == 16 else None)
                self.warm_up, self.attention.warm_up = self.attention.warm_up, lambda *_: None
        else:
            self.attention = decode_verify.DecodeVerify(geometry, slots, own)
        self.words = geometry.mask_words

    def batch(self, chance):
        """Return a batch of 2 or 3 requests at new addresses, with a chain or a tree of new tokens."""
        count = chance.choice((2, LAYER_REQS))
        rows, q_len = count * self.q_len, self.q_len
        tail = Causal()
        if self.mode in (Mode.VERIFY, Mode.RAGGED_VERIFY) and chance.random() < 0.6:
            depth = (rows,) if self.mode is Mode.RAGGED_VERIFY else (count, q_len)
            mask = new_tensor(rows, self.words, dtype=torch.int32, odd=chance.random() < 0.2)
            tail = Tree(mask, new_tensor(*depth, dtype=torch.int32))
        return ForwardBatch(
            self.mode, 0, new_tensor(count, dtype=torch.int32), new_tensor(count + 1, dtype=torch.int32),
            new_tensor(count, chance.choice((300, 4096)), dtype=torch.int32), tail, new_tensor(rows, dtype=torch.int64),
            self.host(count, chance), count, (q_len,) * count, (q_len,) * count, rows, None,
        )  # fmt: skip

    def host(self, count, chance):
        """Return host lengths, for e4m3 prompts known or unknown at random, so that some batches upcast K and V."""
        is_known = self.mode is Mode.EXTEND and self.kv_dtype is torch.float8_e4m3fn and chance.random() < 0.7
        return UpperBound((chance.choice((900, 3000)),) * count) if is_known else Unknown(count, 4000)

    def layer(self, chance):
        """Return a cache of 4 or 6 pages: contiguous K and V, or both interleaved by page."""
        pages, shape = chance.choice((4, 6)), (self.page, HEADS[1], 128)
        if chance.random() < 0.3:
            k, v = map(as_gpu, new_tensor(pages, 2, *shape, dtype=self.kv_dtype).unbind(1))
        else:
            k, v = (new_tensor(pages, *shape, dtype=self.kv_dtype) for _ in range(2))
        scales = [new_tensor(1, dtype=torch.float32, odd=chance.random() < 0.2) for _ in range(2)]
        if self.kv_dtype is torch.bfloat16 or chance.random() < 0.2:
            scales = [None, None]
        elif chance.random() < 0.3:
            scales[1] = scales[0]
        return KVCache(k, v, *scales, new_tensor(HEADS[0], dtype=torch.float32) if self.has_sinks else None)

    def rows(self, batch, chance):
        """Return q and out; q may be a slice of a QKV projection."""
        projected = new_tensor(batch.num_rows, HEADS[0] + 2 * HEADS[1], 128)
        q = as_gpu(projected[:, : HEADS[0]]) if chance.random() < 0.5 else new_tensor(batch.num_rows, HEADS[0], 128)
        return q, new_tensor(batch.num_rows, HEADS[0], 128)

    def new_rows(self, count, chance):
        """Return K and V rows, at random slices of one QKV projection, and their slots."""
        qkv = new_tensor(count, HEADS[0] + 2 * HEADS[1], 128)
        k, v = (as_gpu(one) for one in qkv[:, HEADS[0] :].split(HEADS[1], 1))
        if chance.random() < 0.4:
            k, v = (new_tensor(count, HEADS[1], 128, odd=chance.random() < 0.2) for _ in "kv")
        return k, v, new_tensor(count, dtype=torch.int64)

    new_tensor = staticmethod(new_tensor)
    as_gpu = staticmethod(as_gpu)


def make_calls(layers: Layers) -> tuple[Layers, list[tuple[Any, ...]]]:
    """Return the layers and 40 random attention calls; see `layer_calls`."""
    chance = random.Random(1)
    batches, caches = [layers.batch(chance) for _ in range(6)], [layers.layer(chance) for _ in range(5)]
    calls = []
    for _ in range(40):
        batch = chance.choice(batches)
        q, out = layers.rows(batch, chance)
        calls.append((q, chance.choice(caches), batch, out))
    return layers, calls
