"""Mutants T01 … T14, by outside authors: scales, strides, number ranges and pools of several layer groups.

The authors knew the tutorial and had not read the suite. They wrote 86 defects, and the suite killed 69 at once.
Ten of the other 17 were real faults. They are here, with related mutants.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import BufferSpec, Geometry, Init, Mode, Role, Unit
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVCache, KVPool
from draftmark.tree import TorchTreeOps, VerifyResult

from .limits_and_logits import CSR, QUANTISED, TREES
from .mutant import Mutant, around, on_batch, shaped
from .plain_attention import Parts, attending, right_cap
from .trees import _compact as compacting
from .trees import _walk as walking

Tensor = torch.Tensor
IN_PLACE = {"layouts": ("reference",), "absent": "attend does not read the batch's page table"}
CLAIMS = {"layouts": ("reference",), "absent": "it serves only the five core modes"}
BYTE = {"layouts": CSR, "absent": "the counter belongs to the mutant, so one layout is enough"}


def _capless_window(backend: Any) -> None:
    if backend.geometry.attention.window_left >= 0:
        shaped(logits_soft_cap=0.0)(backend)


def _scale_behind_the_cap(backend: Any) -> None:
    """Compute cap · tanh(q·stored / cap) · k_scale, with the scale outside the soft cap."""
    scale: list[Tensor | None] = [None]

    def cap(scores: Tensor, value: float) -> Tensor:
        k_scale = scale[0]
        return right_cap(scores, value) if k_scale is None else right_cap(scores / k_scale, value) * k_scale

    attending(Parts(cap=cap))(backend)

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        scale[0] = cache.k_scale
        original(q, cache, batch, out)

    around(backend, "attend", call)


def _on_cache(change: Callable[[KVCache], KVCache], *methods: str) -> Callable[[Any], None]:
    """Return a patch that passes a changed cache to `write_kv` and `attend`, or to one of them."""

    def patch(backend: Any) -> None:
        for method in methods or ("write_kv", "attend"):
            at = {"write_kv": 2, "attend": 1}[method]

            def call(original: Callable[..., None], *args: Any, _at: int = at) -> None:
                original(*args[:_at], change(args[_at]), *args[_at + 1 :])

            around(backend, method, call)

    return patch


def _both_scales_or_none(cache: KVCache) -> KVCache:
    if cache.k_scale is None or cache.v_scale is None:
        return replace(cache, k_scale=None, v_scale=None)
    return cache


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


def _strides_of_k(original: Any, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
    reach = (len(v) - 1) * k.stride(0) + v.shape[1] * v.shape[2] + v.storage_offset()
    if reach <= v.untyped_storage().nbytes() // v.element_size():
        v = torch.as_strided(v, v.shape, k.stride(), v.storage_offset())
    original(k, v, cache, batch)


def _byte(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    return [*specs, BufferSpec("steps", Role.WORKSPACE, (1,), "int8", Unit.BYTES, "a counter", init=Init.ZEROS)]


def _counted(backend: Any) -> None:
    """Count steps in a signed byte. After it overflows to negative values, hide the draft tokens."""
    steps = backend.arena["steps"]

    def write_metadata(original: Any, batch: ForwardBatch) -> None:
        original(batch)
        steps.add_(1)

    def seen(visible: Tensor, prefix: Tensor, shape: Any) -> Tensor:
        return visible & ((torch.arange(visible.shape[2]) < prefix[:, None])[:, None] | (steps >= 0))

    around(backend, "write_metadata", write_metadata)
    attending(Parts(seen=seen))(backend)


def _table_of_512(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    columns = torch.arange(batch.page_table.shape[1]).clamp(max=511)
    return replace(batch, page_table=batch.page_table[:, columns])


def _half_offsets(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, q_indptr=batch.q_indptr.half().int())


def _mask_of_the_last(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """In a batch of more than 8 requests with more than 32 slots each, use the previous request's mask."""
    if batch.mode is not Mode.VERIFY or not isinstance(batch.tail, Tree):
        return batch
    slots = batch.tail_lens[0]
    if batch.padded_reqs <= 8 or slots <= 32:
        return batch
    return replace(batch, tail=Tree(batch.tail.mask.roll(slots, 0), batch.tail.depth))


def _strides_of_drafts(original: Any, drafts: Tensor, parents: Tensor, targets: Tensor) -> VerifyResult:
    reach = (len(parents) - 1) * drafts.stride(0) + parents.shape[1] + parents.storage_offset()
    if reach <= parents.untyped_storage().nbytes() // parents.element_size():
        parents = torch.as_strided(parents, parents.shape, drafts.stride(), parents.storage_offset())
    return original(drafts, parents, targets)  # type: ignore[no-any-return]


def _restored(part: Callable[[Geometry], tuple[Any, ...]]) -> Callable[..., None]:
    """Run compact, then undo it in one part of the pool ``[layers, pages, P, heads, dim]``."""

    def call(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
        before = [one.clone() for one in (pool.k, pool.v)]
        TorchTreeOps(ops.geometry).compact(pool, batch, kept)
        at = part(ops.geometry)
        for one, old in zip((pool.k, pool.v), before, strict=True):
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
            one.view(integers)[at].copy_(old.view(integers)[at])

    return call


def _planned(geometry: Geometry, reasons: list[str]) -> list[str]:
    late = ["mode ragged_verify is not served: it is not written yet"]
    return late if Mode.RAGGED_VERIFY in geometry.modes else reasons


def _mutant(name: str, what: str, like: str, **how: Any) -> Mutant:
    return Mutant(name, what, f"outside author; {like}", **how)


MUTANTS = (
    _mutant("T01", "Skips the soft cap on layers with a window", "Gemma 2 has both", patch=_capless_window),
    _mutant("T02", "Multiplies by k_scale after the soft cap", "the order of fp8 and soft cap",
            patch=_scale_behind_the_cap, **QUANTISED),
    _mutant("T03", "Applies fp8 scales only if both k_scale and v_scale exist", "k_scale without v_scale",
            patch=_on_cache(_both_scales_or_none), **QUANTISED),
    _mutant("T04", "Copies the first layer's scales and uses them in all layers", "A20 without a kept tensor",
            patch=_copied_scales, **QUANTISED),
    _mutant("T05", "Reads v with the row stride of k", "RoPE makes k contiguous, v stays a view of the projection",
            patch=lambda b: around(b, "write_kv", _strides_of_k)),
    _mutant("T06", "Counts steps in a signed byte that overflows", "an epoch that turns over",
            hooks={"buffers": _byte, "usage": lambda geometry, found: {**found, "steps": 1}}, patch=_counted, **BYTE),
    _mutant("T07", "Reads page columns after the 512th as the 512th", "a table in shared memory",
            patch=on_batch(_table_of_512, "attend"), **IN_PLACE),
    _mutant("T08", "Computes row offsets in float16", "index arithmetic in q's dtype",
            patch=on_batch(_half_offsets, "write_metadata")),
    _mutant("T09", "Uses the previous request's mask for more than 8 requests with more than 32 slots",
            "two conditions",
            patch=on_batch(_mask_of_the_last)),
    _mutant("T10", "Reads parents in verify_tree with the stride of drafts", "one stride argument",
            hooks=walking(_strides_of_drafts), **TREES),
    _mutant("T11", "Moves only as many heads in compact as its own geometry has", "a layer group with more heads",
            hooks=compacting(_restored(lambda g: (..., slice(g.attention.num_kv_heads, None), slice(None)))), **TREES),
    _mutant("T12", "Moves only as many head elements in compact as its own geometry has",
            "a layer group with wider heads",
            hooks=compacting(_restored(lambda g: (..., slice(g.attention.head_dim, None)))), **TREES),
    _mutant("T13", "Moves only the first 8 layers in compact", "a grid that is too small",
            hooks=compacting(_restored(lambda g: (slice(8, None),))), **TREES),
    _mutant("T14", "Declares RAGGED_VERIFY and refuses every geometry with it", "a plan declared as a capability",
            hooks={"supports": _planned}, **CLAIMS),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("T01", "T02"), "numerics.survive_any_logits"),
    "T03": "numerics.each_scale_counts_alone",
    "T04": "layers.have_their_own_caches",
    "T05": "inputs.may_be_views_of_one_projection",
    "T06": "history.an_arena_serves_for_long",
    "T07": "production.every_page_column_is_read",
    "T08": "production.many_rows_are_right",
    "T09": "production.wide_tails_are_right",
    "T10": "tree_ops.walk_follows_the_target",
    **dict.fromkeys(("T11", "T12", "T13"), "tree_ops.every_pool_is_served"),
    "T14": "supports.claims_are_served",
}
"""Check that must kill each mutant."""
