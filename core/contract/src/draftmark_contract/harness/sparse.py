"""Allocates a KV pool of billions of elements, for forwards that touch only a few of its pages."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from draftmark.geometry import Form

from ..cases.forwards import ForwardCase
from .pools import LAYERS, Pool
from .tensor_forms import KVForm, kv_pages


@contextmanager
def sparse_pool(forward: ForwardCase, device: str) -> Iterator[Pool]:
    """Yield a pool of zeros: one contiguous layer, or for Form.STRIDED_KV several layers in KVForm.BY_PAGE."""
    geometry, strided = forward.geometry, Form.STRIDED_KV in forward.geometry.forms
    form, layers = (KVForm.BY_PAGE, LAYERS) if strided else (KVForm.CONTIGUOUS, 1)
    with ExitStack() as kept:

        def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
            return kept.enter_context(sparse_memory(shape, dtype, device))

        yield Pool(kv_pages(geometry, forward.num_pages, form, device, layers, empty), forward.name)


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
