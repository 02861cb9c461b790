"""Mutants that the checks of `layers` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark.runtime import ForwardBatch, KVCache

from ..designs.changes import on_cache
from ..designs.layouts import QUANTISED
from ..mutant import Mutant, around


def _pitch_of_layers(backend: Any) -> None:
    """Learn the pitch of the layers from the first two caches of a step, and find the later caches by it."""
    step: dict[str, Any] = {}

    def write(original: Any, batch: ForwardBatch) -> None:
        step.clear()
        original(batch)

    def attend(original: Any, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
        index = step["index"] = step.get("index", -1) + 1
        if index < 2:
            step[index] = cache
        else:
            pools = [_layer(*(getattr(step[i], name) for i in (0, 1)), index) for name in ("k", "v")]
            if all(pool is not None for pool in pools):
                cache = replace(cache, k=pools[0], v=pools[1])
        original(q, cache, batch, out)

    around(backend, "write_metadata", write)
    around(backend, "attend", attend)


def _layer(first: torch.Tensor, second: torch.Tensor, index: int) -> torch.Tensor | None:
    """Return the layer at first + index · (second - first), or None where that is not in the same pool."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return None
    at = first.storage_offset() + index * (second.storage_offset() - first.storage_offset())
    inside = at >= 0 and (at + first.numel()) * first.element_size() <= first.untyped_storage().nbytes()
    return first.as_strided(first.shape, first.stride(), at) if inside else None


def _first_cache(backend: Any) -> None:
    seen: list[KVCache] = []

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        seen[1:] = []
        seen.append(cache)
        original(q, seen[0], batch, out)

    around(backend, "attend", call)


def _first_scales(backend: Any) -> None:
    seen: list[tuple[Tensor | None, Tensor | None]] = []

    def scaled(cache: KVCache) -> KVCache:
        seen.append((cache.k_scale, cache.v_scale))
        return replace(cache, k_scale=seen[0][0], v_scale=seen[0][1])

    around(backend, "write_kv", lambda original, k, v, cache, batch: original(k, v, scaled(cache), batch))
    around(backend, "attend", lambda original, q, cache, batch, out: original(q, scaled(cache), batch, out))


def _scales_on_the_host(backend: Any) -> None:
    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if cache.k_scale is not None:
            cache = replace(cache, k_scale=torch.ones(1) * cache.k_scale.item())
        original(q, cache, batch, out)

    around(backend, "attend", call)


def _by_storage(backend: Any) -> None:
    """Keep the views of the first layer for each memory that a forward's caches lie in."""
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def known(cache: KVCache) -> KVCache:
        k, v = kept.setdefault(cache.k.untyped_storage().data_ptr(), (cache.k, cache.v))
        return replace(cache, k=k, v=v)

    around(backend, "write_metadata", lambda original, batch: (kept.clear(), original(batch))[1])
    on_cache(known)(backend)


def _copied_scales(backend: Any) -> None:
    """Copy the scales of the first layer after each write_metadata, and use the copies in every layer."""
    copies: list[KVCache] = []

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if not copies and cache.k_scale is not None and cache.v_scale is not None:
            copies.append(replace(cache, k_scale=cache.k_scale.clone(), v_scale=cache.v_scale.clone()))
        if copies:
            cache = replace(cache, k_scale=copies[0].k_scale, v_scale=copies[0].v_scale)
        original(q, cache, batch, out)

    around(backend, "attend", attend)
    around(backend, "write_metadata", lambda original, batch: (copies.clear(), original(batch))[1])


MUTANTS = (
    Mutant("G03", "Keeps the first layer's views of each memory", "a TMA descriptor by storage address",
           patch=_by_storage),
    Mutant("OG1", "Finds the third and later layers by the pitch of the first two", "layers that skip one",
           patch=_pitch_of_layers, layouts=("csr",), absent="tried in csr"),
    Mutant("R12", "Reads the first layer's KV cache in all layers", "TRT-LLM#16801", patch=_first_cache),
    Mutant("R13", "Uses the first layer's fp8 scales in all layers", "vllm#25513", patch=_first_scales, **QUANTISED),
    Mutant("R14", "Reads fp8 scales on the host in every step", "–", patch=_scales_on_the_host, **QUANTISED),
    Mutant("T04", "Copies the first layer's scales and uses them in all layers", "A20 without a kept tensor",
           patch=_copied_scales, **QUANTISED),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("G03", "OG1", "T04"), "layers.have_their_own_caches"),
    **dict.fromkeys(("R12", "R13", "R14"), "layers.have_their_own_caches_in_a_graph"),
}
