"""Correct latent attention in four designs other than the reference's, as base classes for mutants.

`Flash` loops over tiles of keys, `Split` merges shares of the keys, `Composed` merges the prefix with the masked tail,
and `Lists` gathers a list of slots for each row. All pack the rows and heads of a request into one axis.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import CORE_MODES, PLAIN_ROWS, ROW_FORMATS, Form, Geometry, Mode
from draftmark.runtime import Arena, Block, ForwardBatch, KVCache
from draftmark_contract.profiles import Profile, profiles_of

from ..mutant import ONLY, Mutant, after
from .layouts import ONE_DESIGN
from .tutorial import Backend, Plugin

Tensor = torch.Tensor
Partial = tuple[Tensor, Tensor]
"""Outputs ``[packed rows, value_dim]``, and natural log-sum-exps ``[packed rows]``."""
TILE = 64
"""Packed rows, and keys, of one tile."""


def merged(parts: list[Partial]) -> Partial:
    """Return the attention over all keys from the attention over each share of them."""
    lse = torch.stack([one for _, one in parts]).logsumexp(0)
    weights = [(one - lse).exp().nan_to_num(0.0)[:, None] for _, one in parts]
    return torch.stack([weight * out for weight, (out, _) in zip(weights, parts, strict=True)]).sum(0), lse


class Latent(Backend):
    """Latent attention of one request after another, in parts that a mutant replaces."""

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        self.geometry, self.value_dim = geometry, self.shape.value_width

    def write_kv(self, k: Tensor, v: Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Store whole rows at the KV slots of the rows, in one buffer or in two."""
        rows = torch.split(k[:, 0], [self.value_dim, self.shape.head_dim - self.value_dim], -1)
        for pages, part in zip(cache.parts, rows, strict=True):
            pages.flatten(0, 1).index_copy_(0, self.slots[: batch.num_rows], part)

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, lse: Tensor | None = None) -> None:
        """Attend request by request."""
        first = 0
        for request, (q_len, tail_len) in enumerate(zip(batch.q_lens, batch.tail_lens, strict=True)):
            rows = slice(first, first + q_len)
            first += q_len
            if q_len:
                found, sums = self.request(q[rows].float(), cache, batch, request, rows, tail_len)
                out[rows] = found.view(q_len, -1, self.value_dim).to(out.dtype)
                if lse is not None:
                    lse[rows] = sums.view(q_len, -1)

    def request(
        self, q: Tensor, cache: KVCache, batch: ForwardBatch, request: int, rows: slice, tail_len: int
    ) -> Partial:
        """Return the attention of one request's rows ``[q, heads, head_dim]``, with rows and heads packed."""
        prefix = self.length(batch, request)
        keys = self.gathered(cache, batch.page_table[request], prefix + tail_len)
        seen = self.seen(batch, request, rows, prefix, tail_len)
        return self.packed(q.flatten(0, 1), keys, self.by_head(seen), prefix)

    def length(self, batch: ForwardBatch, request: int) -> Tensor:
        """Return the prefix length of a request."""
        return batch.prefix_lens[request].long()

    def gathered(self, cache: KVCache, table: Tensor, end: Tensor) -> Tensor:
        """Return the rows ``[width, head_dim]`` of a request in float32, with zeros from `end` on."""
        rows = self.joined([part[table].flatten(0, 1) for part in self.parts(cache)])
        return self.cleared(rows, (torch.arange(self.width, device=end.device) < end)[:, None])

    def parts(self, cache: KVCache) -> tuple[Tensor, ...]:
        """Return value parts and rests of the rows; their bytes, if rows have scales of their own."""
        if self.shape.row_format == PLAIN_ROWS:
            return cache.parts
        return tuple(part.view(torch.uint8) for part in cache.parts)

    def joined(self, parts: list[Tensor]) -> Tensor:
        """Return whole rows in float32 from their gathered parts."""
        rows = torch.cat(parts, -1)
        if self.shape.row_format == PLAIN_ROWS:
            return rows.float()
        numbers = rows[:, :512].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (4, 128))
        return torch.cat([(numbers * self.block_scales(rows)[..., None]).flatten(1), self.rest(rows)], -1)

    def block_scales(self, rows: Tensor) -> Tensor:
        """Return the scales ``[rows, 4]`` of rows of 656 bytes."""
        return rows[:, 512:528].contiguous().view(torch.float32)

    def rest(self, rows: Tensor) -> Tensor:
        """Return the rests ``[rows, 64]`` of rows of 656 bytes in float32."""
        return rows[:, 528:].contiguous().view(torch.bfloat16).float()

    def cleared(self, rows: Tensor, used: Tensor) -> Tensor:
        """Return the rows with zeros where they are not used."""
        return torch.where(used, rows, 0.0)

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        """Return the keys that each row sees, bool ``[q, width]``."""
        if isinstance(batch.tail, Block):
            key = torch.arange(self.width, device=prefix.device)
            return (key < prefix + tail_len).expand(rows.stop - rows.start, -1)
        return self._visible(batch, request, rows, prefix, tail_len)

    def by_head(self, seen: Tensor) -> Tensor:
        """Return the visibility of packed rows: a row's heads are neighbors."""
        return seen.repeat_interleave(self.shape.num_qo_heads, 0)

    def scores(self, q: Tensor, keys: Tensor) -> Tensor:
        """Return scaled logits ``[packed rows, keys]``."""
        return q @ keys.T * self.scale

    def values(self, keys: Tensor) -> Tensor:
        """Return the values ``[keys, value_dim]`` of rows."""
        return keys[:, : self.value_dim]

    def partial(self, q: Tensor, keys: Tensor, seen: Tensor) -> Partial:
        """Return the attention over these keys only."""
        logits = self.scores(q, keys).masked_fill(~seen, float("-inf"))
        return logits.softmax(-1).nan_to_num(0.0) @ self.values(keys), logits.logsumexp(-1)

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        """Return the attention of packed rows. A design overrides this method."""
        return self.partial(q, keys, seen)


class Flash(Latent):
    """Loops over tiles of packed rows and of keys with a running maximum and sum."""

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        """Return the attention of packed rows, tile by tile."""
        tiles = [self.row_tile(q, keys, seen, first) for first in range(0, len(q), TILE)]
        return torch.cat([out for out, _ in tiles]), torch.cat([lse for _, lse in tiles])

    def row_tile(self, q: Tensor, keys: Tensor, seen: Tensor, first: int) -> Partial:
        """Return the attention of one tile of packed rows."""
        here = slice(first, first + TILE)
        top = q.new_full((len(q[here]), 1), float("-inf"))
        total, out = torch.zeros_like(top), q.new_zeros(len(top), self.value_dim)
        for begin in range(0, len(keys), TILE):
            tile = slice(begin, begin + TILE)
            logits = self.scores(q[here], keys[tile]).masked_fill(~seen[here, tile], float("-inf"))
            now = torch.maximum(top, logits.amax(-1, keepdim=True))
            floor = now.clamp(min=-1e38)
            weights, fade = (logits - floor).exp(), (top - floor).exp()
            total, out, top = total * fade + weights.sum(-1, keepdim=True), out * fade, now
            out = out + weights @ self.values(keys[tile])
        return out / total.clamp(min=1e-38), (top + total.log())[:, 0]


class Split(Latent):
    """Divides the keys into shares, and merges their partial results."""

    shares = 3

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        """Return the attention of packed rows, share by share."""
        size = -(-len(keys) // self.shares)
        cuts = [slice(first, first + size) for first in range(0, len(keys), size)]
        return self.combined([self.partial(q, keys[cut], seen[:, cut]) for cut in cuts])

    def combined(self, parts: list[Partial]) -> Partial:
        """Return the merged shares."""
        return merged(parts)


class Composed(Latent):
    """Attends to the prefix without a mask, then to the tail with the mask, and merges both levels."""

    def packed(self, q: Tensor, keys: Tensor, seen: Tensor, prefix: Tensor) -> Partial:
        """Return the attention of packed rows, level by level."""
        before = torch.arange(len(keys), device=keys.device) < prefix
        first = self.partial(q, keys, before.expand(len(q), -1))
        return merged([first, self.partial(q, keys, seen & ~before)])


class Lists(Latent):
    """Gathers the rows of a list of slots for each query row: its prefix and its ancestors."""

    def request(
        self, q: Tensor, cache: KVCache, batch: ForwardBatch, request: int, rows: slice, tail_len: int
    ) -> Partial:
        """Return the attention of one request's rows, each over its own list."""
        prefix = self.length(batch, request)
        seen = self.seen(batch, request, rows, prefix, tail_len)
        pools = [part.flatten(0, 1) for part in self.parts(cache)]
        slots = self.slots_of(batch.page_table[request])
        found = []
        for row in range(len(q)):
            listed = torch.where(seen[row], slots, 0)
            keys = torch.where(seen[row][:, None], self.joined([pool[listed] for pool in pools]), 0.0)
            found.append(self.partial(q[row], keys, seen[row].expand(q.shape[1], -1)))
        return torch.cat([out for out, _ in found]), torch.cat([lse for _, lse in found])

    def slots_of(self, table: Tensor) -> Tensor:
        """Return the KV slot of each position of a request."""
        size = self.shape.page_size
        return (table.long()[:, None] * size + torch.arange(size, device=table.device)).flatten()[: self.width]


class LatentPlugin(Plugin):
    """Plugin of a latent design: all modes except RAGGED_VERIFY, rows in one buffer or two, no other layers' rows."""

    info = replace(
        Plugin.info,
        latent=True,
        lse=True,
        modes=(*CORE_MODES, Mode.DRAFT_BLOCK),
        forms=(Form.LATENT_PARTS, Form.ENGINE_STORES),
        row_formats=ROW_FORMATS,
    )

    def supports(self, geometry: Geometry) -> list[str]:
        """Return the tutorial's reasons, and one for a latent layer with a window."""
        a = geometry.attention
        window = a.latent and a.window_left >= 0
        own_scales = a.row_format != PLAIN_ROWS
        reasons = [one for one in super().supports(geometry) if not (own_scales and one.startswith("kv_dtype"))]
        return reasons + [f"window_left {a.window_left} is not served"] * window


def latent_plugin(backend: type[Latent], base: type[LatentPlugin] = LatentPlugin, **fields: Any) -> type[LatentPlugin]:
    """Return a plugin class that opens `backend` for latent layers, and the tutorial's for all others."""

    def open_backend(self: Plugin, geometry: Geometry, arena: Arena) -> Backend:
        return backend(geometry, arena) if geometry.attention.latent else Backend(geometry, arena)

    made = {"open_backend": open_backend, "__module__": Plugin.__module__, **fields}
    return type(f"{backend.__name__}Plugin", (base,), made)


DESIGNS: dict[str, type[Latent]] = {one.__name__: one for one in (Flash, Split, Composed, Lists)}


def zeros_in(profile: Profile) -> Callable[[Any], None]:
    """Return a patch that writes zeros for every geometry of a profile."""

    def patch(backend: Any) -> None:
        if profile in profiles_of(backend.geometry):
            after(backend, "attend", lambda q, cache, batch, out, *lse: out.zero_())

    return patch


def latent_mutant(name: str, what: str, backend: type[Latent], source: str = "") -> Mutant:
    return Mutant(name, what, source, layouts=("tutorial",), absent=ONLY, plugin=latent_plugin(backend))


def refuses(when: Callable[[Geometry], bool], reason: str) -> dict[str, Any]:
    return {"supports": lambda geometry, reasons: [*reasons, *[reason] * when(geometry)]}


def with_hooks(name: str, what: str, hooks: dict[str, Any], source: str = "") -> Mutant:
    return Mutant(name, what, source, hooks=hooks, layouts=("reference",), absent=ONE_DESIGN)


def is_latent(geometry: Geometry) -> bool:
    return geometry.attention.latent
