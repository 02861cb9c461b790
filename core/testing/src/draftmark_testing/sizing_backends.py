"""Backends that only declare buffer sizes, for tests of the contract: correct ones, and ones with one wrong size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from types import SimpleNamespace
from typing import Any

from draftmark.backend_info import BackendInfo
from draftmark.buffers import BufferSpec
from draftmark.geometry import Geometry, Mode, ceil_div, maximum
from draftmark.hookspecs import hookimpl
from draftmark.loaded import LoadedBackend
from draftmark.requirements import Requirements
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Tier
from draftmark_contract.layouts import Layout, LengthConvention, Level, MetadataSpec
from draftmark_contract.roles import Role

Sizing = Callable[[Geometry], list[BufferSpec]]
INT = "int32"


def subject_of(
    buffers: Sizing,
    level: Callable[[list[BufferSpec]], Level],
    supports: Callable[[Geometry], list[str]] = lambda geometry: [],
    usage: Callable[[Geometry, Any], dict[str, int]] = lambda geometry, batch: {},
    requirements: Requirements = Requirements(),  # noqa: B008  it is frozen
    **spec: Any,
) -> BackendUnderTest:
    """Return a backend named ``sized`` that declares buffers but cannot run attention."""

    def layouts(geometry: Geometry) -> dict[Any, MetadataSpec]:
        values = {"levels": (level(buffers(geometry)),), **spec}
        return {mode: MetadataSpec(**values) for mode in geometry.modes}

    hooks: dict[str, Callable[..., Any]] = {
        "describe": lambda: BackendInfo(
            "sized", "cpu", 0, host_kernels=False, sinks=True, batch_invariant=True, latent=True
        ),
        "supports": lambda geometry: supports(geometry),
        "buffers": lambda geometry: buffers(geometry),
        "requirements": lambda geometry: requirements,
        "open_backend": lambda geometry, arena: object(),
        "graph_state": lambda geometry, device: object(),
    }
    plugin = SimpleNamespace(**{f"draftmark_{name}": hookimpl(hook) for name, hook in hooks.items()})
    plugin.contract_notes = lambda: SimpleNamespace(layouts=layouts, usage=usage)
    return BackendUnderTest(LoadedBackend("sized", plugin), "cpu", Tier.SIZING)


def level_of(layout: Layout, lengths: LengthConvention = LengthConvention.PREFIX_PLUS_TAIL) -> Any:
    """Return a function that describes one attention pass (`Level`), with every buffer named after its role."""
    return lambda specs: Level(layout, lengths, {spec.name: spec.name for spec in specs}, masked=True)


def one(role: Role, shape: tuple[Any, ...], dtype: str = INT) -> BufferSpec:
    """Return the spec of a buffer that is named after its role."""
    return BufferSpec(role.value, shape, dtype, "test formula")


def csr_pages(g: Geometry) -> list[BufferSpec]:
    """Return buffers for page ids in CSR form, with mask rows, slots and depths: one buffer for each index role."""
    return [
        one(Role.KV_INDPTR, (g.max_reqs + 1,), "int64"),
        one(Role.KV_INDICES, (g.max_reqs * g.max_pages_per_req,), "int64"),
        one(Role.KV_LAST_PAGE_LEN, (g.max_reqs,)),
        one(Role.QO_INDPTR, (g.max_reqs + 1,)),
        one(Role.TAIL_MASK, (g.max_reqs * _tree_rows(g), g.mask_words)),
        one(Role.SLOT_MAPPING, (g.max_rows_any,), "int64"),
        one(Role.TAIL_DEPTH, (g.max_reqs, g.max_tail)),
    ]


def csr_tokens(g: Geometry) -> list[BufferSpec]:
    """Return buffers for token slots in CSR form, with one bit mask per request; the masks are concatenated."""
    mask_bytes = ceil_div(_tree_rows(g) * g.max_tail, 8)
    return [
        one(Role.KV_INDPTR, (g.max_reqs + 1,), "int64"),
        one(Role.KV_INDICES, (g.max_reqs * g.max_kv_len,), "int64"),
        one(Role.MASK_INDPTR, (g.max_reqs + 1,)),
        one(Role.TAIL_MASK, (g.max_reqs * mask_bytes,), "uint8"),
    ]


def page_table(g: Geometry) -> list[BufferSpec]:
    """Return buffers for a page table, lengths, slot mapping and output staging."""
    return [
        one(Role.PAGE_TABLE, (g.max_reqs, g.max_pages_per_req), "int64"),
        one(Role.KV_LENS, (g.max_reqs,)),
        one(Role.SLOT_MAPPING, (g.max_rows_any,), "int64"),
        one(Role.OUTPUT_STAGING, (g.max_rows_any, g.attention.num_qo_heads, g.attention.head_dim), "float32"),
    ]


def two_levels(g: Geometry) -> list[BufferSpec]:
    """Return buffers for two attention passes: the prefix by pages, and the tail (draft tokens) by token slots."""
    tail = g.max_reqs * g.max_tail
    prefix_pages = ceil_div(g.max_prefix_len, g.attention.page_size)
    return [
        BufferSpec("prefix_indptr", (g.max_reqs + 1,), "int64", "test formula"),
        BufferSpec("prefix_indices", (g.max_reqs * prefix_pages,), "int64", "test formula"),
        BufferSpec("tail_indptr", (g.max_reqs + 1,), "int64", "test formula"),
        BufferSpec(
            "tail_indices",
            (maximum(tail, g.limits.max_extend_tokens),),
            "int64",
            "test formula",
        ),
    ]


def two_level_subject(sizing: Sizing = two_levels) -> BackendUnderTest:
    """Return a backend with one attention pass over the prefix and one over the tail (draft tokens)."""
    prefix = {"kv_indptr": "prefix_indptr", "kv_indices": "prefix_indices"}
    tail = {"kv_indptr": "tail_indptr", "kv_indices": "tail_indices"}
    levels = (
        Level(Layout.CSR_PAGES, LengthConvention.PREFIX, prefix),
        Level(Layout.CSR_TOKENS, LengthConvention.TAIL, tail, masked=True),
    )
    return subject_of(sizing, lambda specs: levels[0], levels=levels)


def _tree_rows(g: Geometry) -> Any:
    of_modes = {Mode.VERIFY: g.draft.num_draft_tokens, Mode.DRAFT: g.draft.topk}
    return reduce(maximum, (rows for mode, rows in of_modes.items() if mode in g.modes), 1)


NAMES = ("csr_pages", "csr_tokens", "page_table", "two_levels")
LAYOUTS: dict[str, tuple[Sizing, Layout]] = {
    "csr_pages": (csr_pages, Layout.CSR_PAGES),
    "csr_tokens": (csr_tokens, Layout.CSR_TOKENS),
    "page_table": (page_table, Layout.PAGE_TABLE),
}


def correct(layout: str) -> BackendUnderTest:
    """Return the backend with correct buffer sizes for a layout."""
    if layout == "two_levels":
        return two_level_subject()
    sizing, name = LAYOUTS[layout]
    return subject_of(sizing, level_of(name))


def changed(layout: str, role: Role, shape: Callable[[Geometry], tuple[Any, ...]], dtype: str = "") -> BackendUnderTest:
    """Return the backend of a layout with a changed shape (or dtype) of one buffer."""
    sizing, name = LAYOUTS[layout]

    def buffers(g: Geometry) -> list[BufferSpec]:
        return [
            replace(spec, shape=shape(g), dtype=dtype or spec.dtype) if spec.name == role else spec
            for spec in sizing(g)
        ]

    return subject_of(buffers, level_of(name))
