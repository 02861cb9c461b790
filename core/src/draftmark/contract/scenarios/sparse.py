"""A KV pool of billions of elements of which a few pages are ever touched."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .turns import Turn


@contextmanager
def sparse_pool(turn: Turn, device: str) -> Iterator[torch.Tensor]:
    """``[2, num_pages, P, kv_heads, head_dim]`` in kv_dtype, zeros; k and v for `Stage`.

    On the CPU the pages are address space that nothing is reserved for; a device really allocates them.
    """
    a = turn.geometry.attention
    shape = (2, turn.num_pages, a.page_size, a.num_kv_heads, a.head_dim)
    dtype = getattr(torch, a.kv_dtype)
    if device != "cpu":
        yield torch.zeros(shape, dtype=dtype, device=device)
        return
    numel = torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    memory = mmap.mmap(-1, numel * dtype.itemsize, flags=flags)
    yield torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)
