"""Mutants A33 … A52: sizes, claims, plans, stores and pairs of latent layers, and products of their features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from draftmark import BufferSpec, Form, Geometry, Role, Unit
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.lengths import Unknown
from draftmark_contract.profiles import Profile, profiles_of

from .latent_designs import Flash, Split, latent_plugin
from .mutant import ONLY, Mutant, after, around, on_batch, shaped

Tensor = torch.Tensor
IN_ONE_DESIGN = "one design is enough"
TILE = 64
"""Rows times heads of one entry of a schedule."""
_opened: dict[str, Geometry] = {}
"""Latent geometry that a mutant of pairs opened last."""


# -- sizes ----------------------------------------------------------------------------------------------------


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
        return BufferSpec("more", Role.OUTPUT_STAGING, shape, geometry.attention.q_dtype, Unit.ROWS, "rows · width")

    return _with_buffer(spec)


def _tiles(geometry: Geometry, rows: int) -> int:
    return -(-rows * geometry.attention.num_qo_heads // TILE)


def _schedule(geometry: Geometry) -> BufferSpec:
    return BufferSpec("more", Role.SPLIT_SCHEDULE, (geometry.max_reqs, 8), "int32", Unit.BYTES, "max_reqs · 8")


def _partials(geometry: Geometry) -> BufferSpec:
    a = geometry.attention
    shape = geometry.max_reqs, a.num_qo_heads, a.value_width
    return BufferSpec("more", Role.PARTIAL_OUT, shape, "float32", Unit.ROWS, "max_reqs · heads · value_width")


def _narrow_slots(geometry: Geometry, specs: list[BufferSpec]) -> list[BufferSpec]:
    latent = geometry.attention.latent
    return [replace(one, dtype="int32") if latent and one.role is Role.SLOT_MAPPING else one for one in specs]


# -- claims ---------------------------------------------------------------------------------------------------


def _refuses(when: Callable[[Geometry], bool], reason: str) -> dict[str, Any]:
    return {"supports": lambda geometry, reasons: [*reasons, *[reason] * when(geometry)]}


def _only_plain_latent(field: str, value: object) -> Callable[[Any], None]:
    """Return a patch that drops a field of the attention shape of latent layers."""
    return lambda backend: shaped(**{field: value})(backend) if backend.geometry.attention.latent else None


# -- plans, stores and pairs ----------------------------------------------------------------------------------


def _width_of_the_dummy(backend: Any) -> None:
    """Plan at capture for at most two pages, as the dummy batch has."""

    def plan(batch: ForwardBatch) -> None:
        if backend.geometry.attention.latent and isinstance(batch.host, Unknown):
            backend._widths = tuple(min(n, 2) for n in backend._widths)

    after(backend, "plan", plan)


def _stale_slots(backend: Any) -> None:
    """Leave the slots of padded requests as an earlier batch wrote them."""

    def call(original: Any, batch: ForwardBatch) -> None:
        before = backend._slots.clone()
        original(batch)
        if backend.geometry.attention.latent and batch.uniform is not None:
            live = batch.num_reqs * batch.uniform.q_len
            backend._slots[live : batch.num_rows] = before[live : batch.num_rows]

    around(backend, "write_metadata", call)


def _stores_anyway(backend: Any) -> None:
    """Store zeros at the slots of the rows although the engine has stored them."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor, *lse: Tensor) -> None:
        original(q, cache, batch, out, *lse)
        if Form.ENGINE_STORES in backend.geometry.forms:
            backend.write_kv(q.new_zeros(len(q), 1, q.shape[2]), None, cache, batch)

    around(backend, "attend", attend)


def _without_the_tail(backend: Any) -> None:
    """Take the tail for unwritten, because no write_kv has stored it."""

    def metadata(batch: ForwardBatch) -> None:
        if Form.ENGINE_STORES in backend.geometry.forms:
            backend._kv_lens[: batch.padded_reqs] = batch.prefix_lens

    after(backend, "write_metadata", metadata)


def _after_a_latent_layer(change: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a patch of layers with K and V apart that are opened after a latent layer."""

    def patch(backend: Any) -> None:
        geometry = backend.geometry
        if geometry.attention.latent:
            _opened["last"] = geometry
        elif _opened and geometry.limits == _opened["last"].limits:
            change(backend)

    return patch


def _in_kernel_pages(backend: Any) -> None:
    """Read a draft's page ids as those of pages of half the size."""

    def halved(owner: Any, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, page_table=batch.page_table // 2)

    on_batch(halved, "attend")(backend)


def _without_metadata(backend: Any) -> None:
    """Use the metadata of the target's layers for a draft's."""
    backend.write_metadata = lambda batch: None


# -- products of features -------------------------------------------------------------------------------------


def _zeros_with(profile: Profile) -> Callable[[Any], None]:
    """Return a patch that writes zeros for latent rows together with another profile."""

    def patch(backend: Any) -> None:
        needs = profiles_of(backend.geometry)
        if backend.geometry.attention.latent and profile in needs:
            after(backend, "attend", lambda q, cache, batch, out, *lse: out.zero_())

    return patch


class OneWord(Flash):
    """Reads one word of a tail's mask, and takes the slots after it for visible."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen, key = super().seen(batch, request, rows, prefix, tail_len), torch.arange(self.width)
        return seen | ((key >= prefix + 32) & (key < prefix + tail_len) & isinstance(batch.tail, Tree))


class OneThousandKeys(Split):
    """Loses keys from the 1,537th on in batches of more than 16 requests."""

    def seen(self, batch: ForwardBatch, request: int, rows: slice, prefix: Tensor, tail_len: int) -> Tensor:
        seen = super().seen(batch, request, rows, prefix, tail_len)
        lost = (torch.arange(self.width) >= 1536) & (torch.arange(self.width) < prefix)
        return seen & ~lost if batch.padded_reqs > 16 else seen


def _narrow_scale(attention: Any) -> float | None:
    apart = not attention.latent and attention.value_width != attention.head_dim
    return attention.value_width**-0.5 if apart else attention.softmax_scale


def _hooks(name: str, what: str, hooks: dict[str, Any], source: str = "") -> Mutant:
    return Mutant(name, what, source, hooks=hooks, layouts=("reference",), absent=IN_ONE_DESIGN)


def _patch(name: str, what: str, patch: Callable[[Any], None], source: str = "") -> Mutant:
    return Mutant(name, what, source, patch=patch, layouts=("reference",), absent=IN_ONE_DESIGN)


def _latent(geometry: Geometry) -> bool:
    return geometry.attention.latent


MUTANTS = (
    _hooks("A33", "Stages outputs of requests in place of rows",
           _staged(lambda g: g.max_reqs, lambda g: g.output_width)),
    _hooks("A34", "Stages outputs as wide as queries", _staged(lambda g: g.max_rows_any, lambda g: g.query_width)),
    _hooks("A35", "Sizes a schedule by requests in place of rows and heads",
           _with_buffer(_schedule, lambda g, batch: 32 * _tiles(g, batch.num_rows)), "vllm#27368"),
    _hooks("A36", "Sizes partial outputs by requests in place of rows",
           _with_buffer(_partials, lambda g, batch: 4 * batch.num_rows * g.output_width), "sglang#11012"),
    _hooks("A37", "Keeps slots of latent rows in 32 bits", {"buffers": _narrow_slots}, "vllm#47671"),
    _hooks("A38", "Claims latent rows and refuses each of them", _refuses(_latent, "latent rows are not served here")),
    _hooks("A39", "Claims that the engine may store, and refuses it",
           _refuses(lambda g: Form.ENGINE_STORES in g.forms, "form engine_stores is not served here")),
    _patch("A40", "Accepts a window of latent rows and drops it", _only_plain_latent("window_left", -1)),
    _patch("A41", "Accepts a soft cap of latent rows and drops it", _only_plain_latent("logits_soft_cap", 0.0)),
    _hooks("A42", "Refuses latent rows with sinks without naming them",
           _refuses(lambda g: _latent(g) and g.attention.sinks, "this geometry is not served here")),
    _patch("A43", "Freezes the width of the batch at capture", _width_of_the_dummy, "vllm#51119"),
    _patch("A44", "Keeps stale slots of padded requests", _stale_slots, "vllm#36611"),
    _patch("A45", "Stores rows that the engine has stored", _stores_anyway),
    _patch("A46", "Takes rows that the engine stored for unwritten", _without_the_tail),
    _patch("A47", "Reads a draft's pages in the target's kernel pages", _after_a_latent_layer(_in_kernel_pages),
           "tokenspeed#958"),
    _patch("A48", "Uses the metadata of a latent target for its draft", _after_a_latent_layer(_without_metadata),
           "sglang#23490"),
    _patch("A49", "Writes zeros for latent rows under overlap", _zeros_with(Profile.OVERLAP)),
    Mutant("A50", "Reads one mask word over latent rows", "TRT-LLM#13006", layouts=("tutorial",), absent=ONLY,
           plugin=latent_plugin(OneWord)),
    Mutant("A51", "Loses keys from the 1,537th on in crowds", "flashinfer#5170", layouts=("tutorial",), absent=ONLY,
           plugin=latent_plugin(OneThousandKeys)),
    _patch("A52", "Scales the logits of narrow values by value_dim ** -0.5", shaped(softmax_scale=_narrow_scale)),
)  # fmt: skip

KILLER = {
    **dict.fromkeys(("A33", "A35", "A36"), "latent_sizing.covers"),
    "A34": "latent_sizing.is_tight",
    "A37": "latent_sizing.values_fit",
    **dict.fromkeys(("A38", "A39"), "latent_sizing.claims_are_served"),
    **dict.fromkeys(("A40", "A41", "A42"), "latent.features_are_served_or_refused"),
    **dict.fromkeys(("A43", "A44"), "latent_graphs.replay_other_rows"),
    **dict.fromkeys(("A45", "A46"), "latent.engine_may_store"),
    **dict.fromkeys(("A47", "A48"), "latent.pairs_share_their_pages"),
    "A49": "latent.profiles_are_right_together",
    "A50": "latent.trees_may_begin_in_any_page",
    "A51": "latent.a_crowd_is_right",
    "A52": "narrow_values.match_float64",
}
"""Check that must kill each mutant."""
