"""Reads and writes a layer's KV memory by token slots. Learns the layout within a page from the backend's KV writes.

vLLM's backends pack a page in different ways (K next to V, heads first, tiles for a CPU's vector units), and releases
change it. So the judge writes a page through the backend with numbers that identify each element, and reads it back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from draftmark import Geometry
from draftmark_contract.check import Unjudged
from draftmark_contract.judge.driver import SCALES

from .config import FP8, dtype_of

BASE = 16
"""Base of the digits in an element's number. Every KV dtype holds these digits exactly, fp8 too."""
UNWRITTEN = -2.0
"""Value of elements that the writer leaves unchanged."""
Writes = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Function that stores k and v ``[page_size, kv_heads, head_dim]`` as the tokens of one page, through the backend."""


class Memory:
    """Reads and writes the KV memory of one layer by slots.

    Args:
        cache: tensor that is bound to the layer.
        axis: axis of `cache` that counts pages.
        geometry: geometry of the layer.
    """

    def __init__(self, cache: torch.Tensor, axis: int, geometry: Geometry) -> None:
        a = geometry.attention
        self.size, self.heads, self.dim = a.page_size, a.num_kv_heads, a.head_dim
        self.dtype = dtype_of(a.kv_dtype)
        self._scales = SCALES if a.kv_dtype == FP8 else (1.0, 1.0)
        self._pages = cache.movedim(axis, 0)
        self._k = self._v = torch.empty(0, dtype=torch.int64)

    def learn(self, write: Writes) -> None:
        """Find the elements of each token in a page.

        Raises:
            Unjudged: an element of k or v is written never or twice, e.g. because the backend compresses KV.
            RuntimeError: the writer changes another page.
        """
        count = 2 * self.size * self.heads * self.dim
        numbers = torch.arange(count)
        page = 1
        self._fill(UNWRITTEN)
        before, found, weight = self._of(slice(None)).clone(), None, 1
        while weight < count:
            digits = (numbers // weight % BASE).view(2, self.size, self.heads, self.dim).float()
            k, v = (part * scale for part, scale in zip(digits, self._scales, strict=True))
            write(page, k, v)
            part = self._of(page).float().long()
            found = torch.where(part < 0, -1, part * weight + (0 if found is None else found))
            weight *= BASE
        assert found is not None
        self._check(found, before, page, count)
        where = torch.empty(count, dtype=torch.int64)
        used = found >= 0
        where[found[used].cpu()] = used.nonzero().flatten().cpu()
        self._k, self._v = where.view(2, self.size, -1).to(self._pages.device)
        self._fill(0.0)

    def same_as(self, other: Memory) -> None:
        """Copy the learned layout from another layer of equal shape."""
        self._k, self._v = other._k, other._v

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k and v, each ``[slots, kv_heads, head_dim]`` in kv_dtype."""
        pages = self._of(slice(None))
        for where, values in ((self._k, k), (self._v, v)):
            at = (slots // self.size)[:, None].expand(-1, where.shape[1]), where[slots % self.size]
            self._raw(pages)[at] = self._raw(values.flatten(1)).to(pages.device)
        self._back(pages)

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of k and v at these slots."""
        pages = self._raw(self._of(slice(None)))
        found = [
            pages[(slots // self.size)[:, None], where[slots % self.size]]
            .view(-1, self.heads, self.dim)
            .view(self.dtype)
            for where in (self._k, self._v)
        ]
        return found[0], found[1]

    def _of(self, pages: Any) -> torch.Tensor:
        """Return the elements of one page or all pages, flattened, in kv_dtype. Non-contiguous pages are copied."""
        part = self._pages[pages]
        flat = part.reshape(-1) if part.dim() < self._pages.dim() else part.reshape(part.shape[0], -1)
        return flat.view(self.dtype)

    def _back(self, pages: torch.Tensor) -> None:
        if pages.data_ptr() != self._pages.data_ptr():
            self._pages.copy_(pages.view(self._pages.dtype).view(self._pages.shape))

    def _fill(self, value: float) -> None:
        pages = self._of(slice(None)).clone()
        self._raw(pages).copy_(
            self._raw(torch.full((1,), value, device=pages.device).to(self.dtype)).expand(pages.shape)
        )
        self._pages.copy_(pages.view(self._pages.dtype).view(self._pages.shape))

    def _check(self, found: torch.Tensor, before: torch.Tensor, page: int, count: int) -> None:
        used = found[found >= 0]
        different = len(set(used.tolist()))
        if len(used) != count or different != count:
            raise Unjudged(
                f"a page's k and v have {count} elements, but the backend writes {different} of them, {len(used)} "
                "times in total, so the judge cannot find a token's place"
            )
        after = self._raw(self._of(slice(None)))
        others = [n for n in range(len(after)) if n != page and not torch.equal(after[n], self._raw(before)[n])]
        if others:
            raise RuntimeError(f"a write to page {page} changes pages {others[:8]}")

    @staticmethod
    def _raw(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
