"""Mutants that checks of `latent_sizing` kill: sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from draftmark import BufferSpec, Form, Geometry

from ...designs.latent_designs import is_latent, refuses, with_hooks

TILE = 64
"""Rows times heads of one entry of a schedule."""


def _with_buffer(spec: Callable[[Geometry], BufferSpec], usage: Callable[..., int] | None = None) -> dict[str, Any]:
    """Return hooks that add a buffer for latent layers, and its bytes for one batch if only the plugin knows them."""

    def buffers(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
        return [*specs, spec(geometry)] if geometry.attention.latent else specs

    def used(geometry: Geometry, found: dict[str, int], batch: Any) -> dict[str, int]:
        assert usage is not None
        return found | {"more": usage(geometry, batch)} if geometry.attention.latent else found

    return {"buffers": buffers} | ({"usage": used} if usage else {})


def _staged(rows: Callable[[Geometry], int], width: Callable[[Geometry], int]) -> dict[str, Any]:
    def spec(geometry: Geometry) -> BufferSpec:
        shape = rows(geometry), width(geometry)
        return BufferSpec("output_staging", shape, geometry.attention.q_dtype, "rows · width")

    return _with_buffer(spec)


def _tiles(geometry: Geometry, rows: int) -> int:
    return -(-rows * geometry.attention.num_qo_heads // TILE)


def _schedule(geometry: Geometry) -> BufferSpec:
    return BufferSpec("more", (geometry.max_reqs, 8), "int32", "max_reqs · 8")


def _partials(geometry: Geometry) -> BufferSpec:
    a = geometry.attention
    shape = geometry.max_reqs, a.num_qo_heads, a.value_width
    return BufferSpec("more", shape, "float32", "max_reqs · heads · value_width")


def _narrow_slots(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    latent = geometry.attention.latent
    return [replace(one, dtype="int32") if latent and one.name == "slot_mapping" else one for one in specs]


MUTANTS = (
    with_hooks("A33", "Stages outputs of requests in place of rows",
               _staged(lambda g: g.max_reqs, lambda g: g.output_width)),
    with_hooks("A34", "Stages outputs as wide as queries", _staged(lambda g: g.max_rows_any, lambda g: g.query_width)),
    with_hooks("A35", "Sizes a schedule by requests in place of rows and heads",
               _with_buffer(_schedule, lambda g, batch: 32 * _tiles(g, batch.num_rows)), "vllm#27368"),
    with_hooks("A36", "Sizes partial outputs by requests in place of rows",
               _with_buffer(_partials, lambda g, batch: 4 * batch.num_rows * g.output_width), "sglang#11012"),
    with_hooks("A37", "Keeps slots of latent rows in 32 bits", {"buffers": _narrow_slots}, "vllm#47671"),
    with_hooks("A38", "Claims latent rows and refuses each of them",
               refuses(is_latent, "latent rows are not served here")),
    with_hooks("A39", "Claims that the engine may store, and refuses it",
               refuses(lambda g: Form.ENGINE_STORES in g.forms, "form engine_stores is not served here")),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("A33", "A35", "A36"), "latent_sizing.covers"),
    "A34": "latent_sizing.is_tight",
    "A37": "latent_sizing.values_fit",
    **dict.fromkeys(("A38", "A39"), "latent_sizing.claims_are_served"),
}
