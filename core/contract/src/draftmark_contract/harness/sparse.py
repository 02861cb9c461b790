"""Allocates a KV pool of billions of elements, for forwards that touch only a few of its pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..cases.forwards import ForwardCase


@contextmanager
def sparse_pool(forward: ForwardCase, device: str) -> Iterator[torch.Tensor]:
    """Yield zeros ``[2, num_pages, P, kv_heads, head_dim]`` in kv_dtype: k and v for `CaseTensors`."""
    a = forward.geometry.attention
    shape = (2, forward.num_pages, a.page_size, a.num_kv_heads, a.head_dim)
    with sparse_memory(shape, getattr(torch, a.kv_dtype), device) as memory:
        yield memory


@contextmanager
def sparse_memory(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[torch.Tensor]:
    """Yield a tensor of zeros. On a CPU untouched pages take no memory; on a device all of it is allocated."""
    if device != "cpu":
        yield torch.zeros(shape, dtype=dtype, device=device)
        return
    numel = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    yield torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)
