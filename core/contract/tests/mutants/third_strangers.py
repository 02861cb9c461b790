"""The third attack: what survived of 86 defects by people who had read the tutorial and no line of the suite.

69 were killed when they came; of the 17 others ten were real faults, and are here, with two others of their classes.
Each is held against the check of its class.
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

from .mutant import Mutant, around, on_batch, shaped
from .plain_attention import Parts, attending, right_cap
from .strangers import CSR, QUANTISED, TREES
from .trees import _compact as compacting
from .trees import _walk as walking

Tensor = torch.Tensor
IN_PLACE = {"layouts": ("reference",), "absent": "its attention reads no page table of the batch's"}
CLAIMS = {"layouts": ("reference",), "absent": "it claims the five core modes alone"}
BYTE = {"layouts": CSR, "absent": "one layout shows it: the counter is the mutant's own"}


def _capless_window(backend: Any) -> None:
    if backend.geometry.attention.window_left >= 0:
        shaped(logits_soft_cap=0.0)(backend)


def _scale_behind_the_cap(backend: Any) -> None:
    """cap · tanh(q·stored / cap) · k_scale."""
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
    """A patch that shows another cache to `write_kv` and `attend`, or to one of them."""

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
    """The first layer's scales are copied, and the copies serve the other layers: nobody's tensor is kept."""
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
    """Steps are counted in a signed byte; below zero the tail is taken for what an earlier step left."""
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
    """Of more than 8 requests with more than 32 slots each: the mask of the request before."""
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
    """compact, but a part of the pool ``[layers, pages, P, heads, dim]`` is as it was."""

    def call(ops: Any, pool: KVPool, batch: ForwardBatch, kept: VerifyResult) -> None:
        before = [one.clone() for one in (pool.k, pool.v)]
        TorchTreeOps(ops.geometry).compact(pool, batch, kept)
        at = part(ops.geometry)
        for one, old in zip((pool.k, pool.v), before, strict=True):
            integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[one.element_size()]
            one.view(integers)[at].copy_(old.view(integers)[at])

    return call


def _planned(geometry: Geometry, reasons: list[str]) -> list[str]:
    late = ["mode ragged_verify is not served: it is still to be written"]
    return late if Mode.RAGGED_VERIFY in geometry.modes else reasons


def _mutant(name: str, what: str, like: str, **how: Any) -> Mutant:
    return Mutant(name, what, f"a stranger; {like}", **how)


MUTANTS = (
    _mutant("T01", "soft cap skipped on layers that have a window", "Gemma 2 has both", patch=_capless_window),
    _mutant("T02", "k_scale multiplied in behind the cap", "the order of fp8 and soft cap",
            patch=_scale_behind_the_cap, **QUANTISED),
    _mutant("T03", "scales applied only if both are there", "k_scale without v_scale",
            patch=_on_cache(_both_scales_or_none), **QUANTISED),
    _mutant("T04", "the first layer's scales copied, and used for the others", "A20 without a kept tensor",
            patch=_copied_scales, **QUANTISED),
    _mutant("T05", "v read with k's row stride", "RoPE makes k contiguous, v stays a view of the projection",
            patch=lambda b: around(b, "write_kv", _strides_of_k)),
    _mutant("T06", "steps counted in a signed byte of the arena", "an epoch that turns over",
            hooks={"buffers": _byte, "usage": lambda geometry, found: {**found, "steps": 1}}, patch=_counted, **BYTE),
    _mutant("T07", "page columns from the 512th on read as the 511th", "a table in shared memory",
            patch=on_batch(_table_of_512, "attend"), **IN_PLACE),
    _mutant("T08", "row offsets in half floats", "index arithmetic in q's dtype",
            patch=on_batch(_half_offsets, "write_metadata")),
    _mutant("T09", "more than 8 requests with more than 32 slots: the mask of the request before", "two conditions",
            patch=on_batch(_mask_of_the_last)),
    _mutant("T10", "verify_tree reads parents with the stride of drafts", "one stride argument",
            hooks=walking(_strides_of_drafts), **TREES),
    _mutant("T11", "compact moves the heads of its own geometry alone", "a layer group with more heads",
            hooks=compacting(_restored(lambda g: (..., slice(g.attention.num_kv_heads, None), slice(None)))), **TREES),
    _mutant("T12", "compact moves the head_dim of its own geometry alone", "a layer group with wider heads",
            hooks=compacting(_restored(lambda g: (..., slice(g.attention.head_dim, None)))), **TREES),
    _mutant("T13", "compact moves the first 8 layers alone", "a grid that is too small",
            hooks=compacting(_restored(lambda g: (slice(8, None),))), **TREES),
    _mutant("T14", "RAGGED_VERIFY claimed, and refused whatever the geometry", "a plan declared as a capability",
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
"""The check of each mutant's class."""
