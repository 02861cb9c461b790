"""Mutants that checks of `numerics` kill: values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Geometry, Mode
from draftmark.runtime import ForwardBatch, KVCache

from ...designs.changes import on_cache
from ...designs.layouts import QUANTISED, of_tutorial
from ...designs.plain_attention import Parts, attending, right_cap
from ...designs.tutorial import Backend, Plugin
from ...designs.tutorial_parts import TutorialParts, opens
from ...mutant import Mutant, around, forgets_cap, shaped


class HalfLogits(TutorialParts):
    """Keeps q·k in fp16 and scales it afterwards: values above 65504 become infinite, and inf - inf is NaN."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        if self.shape.q_dtype != "float16":
            return super().scores(q, k)
        return torch.einsum("qhd,nhd->hqn", q, k).half().float() * self.scale


class TileMax(TutorialParts):
    """Uses one maximum for all rows and heads of an MMA tile: rows with logits about 100 below it underflow."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        masked = scores.masked_fill(~seen, float("-inf"))
        tile = masked.unflatten(0, (-1, self.shape.group_size))  # the group's heads and all rows share a tile
        shifted = (tile - tile.amax((1, 2, 3), keepdim=True)).exp().flatten(0, 1)
        return shifted / shifted.sum(-1, keepdim=True).clamp(min=1e-30)


class HalfWeights(TutorialParts):
    """Keeps softmax weights in fp16 and flushes subnormals: uniform attention over more than 16k keys sums to zero."""

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        weights = super().weights(scores, seen)
        if self.shape.q_dtype != "float16":
            return weights
        half = weights.half()
        return torch.where(half < 2.0**-14, 0, half).float()


class CapIgnored(Plugin):
    """`supports` accepts a soft cap, but the softmax does not apply it."""

    def supports(self, geometry: Geometry) -> list[str]:
        attention = replace(geometry.attention, logits_soft_cap=0.0)
        return super().supports(replace(geometry, attention=attention))


class LastToken(TutorialParts):
    """Sends an EXTEND chunk of one token to a decode kernel that does not receive the window."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        inside = super().in_window(batch, rows, row, key)
        return inside | (batch.mode is Mode.EXTEND and rows.stop - rows.start == 1)


def _heads(condition: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a patch that reverses the KV heads of attention shapes that meet the condition."""

    def patch(backend: Any) -> None:
        if not condition(backend.geometry.attention):
            return

        def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
            flipped = replace(cache, k=cache.k.flip(2), v=cache.v.flip(2))
            original(q, flipped, batch, out)

        around(backend, "attend", call)

    return patch


DRAFTING = (Mode.DRAFT, Mode.DRAFT_EXTEND)


def _exponential_cap(scores: Tensor, cap: float) -> Tensor:
    power = torch.exp(2 * scores / cap)
    return cap * (power - 1) / (power + 1)


def _from(start: float) -> Parts:
    """Clamp the row maximum of the softmax to at least `start`. Rows with smaller logits then underflow."""

    def weights(scores: Tensor, shape: Any) -> Tensor:
        power = torch.exp(scores - scores.amax(-1, keepdim=True).clamp(min=start))
        return power / power.sum(-1, keepdim=True)

    return Parts(weights=weights)


def _no_maximum(scores: Tensor, shape: Any) -> Tensor:
    power = torch.exp(scores)
    return power / power.sum(-1, keepdim=True)


def _rounded_scores(scores: Tensor, shape: Any) -> Tensor:
    return scores.to(getattr(torch, shape.q_dtype)).float().softmax(-1).nan_to_num(0.0)


def _rounded_sums(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute partial outputs of 16 keys each and add them in the dtype of the queries."""
    parts = zip(weights.split(16, -1), v.split(16, 1), strict=True)
    found = [torch.einsum("rhqk,rkhd->rqhd", weight, value).to(dtype) for weight, value in parts]
    total = found[0]
    for part in found[1:]:
        total = total + part
    return total


def _v_after_k(cache: KVCache) -> KVCache:
    """Find V one layer's K after K, as in a pool of one layer ``[2, pages, …]``."""
    k = cache.k
    start = k.storage_offset() + k.numel()
    whole = k.untyped_storage().nbytes() // k.element_size()
    if not k.is_contiguous() or start + k.numel() > whole:
        return cache
    return replace(cache, v=torch.as_strided(k, k.shape, k.stride(), start))


def _from_the_start(cache: KVCache) -> KVCache:
    """Read K and V from the start of their memory where they are two tensors of a KVPool."""
    found = [one.as_strided(one.shape, one.stride(), one.storage_offset() % one.numel()) for one in (cache.k, cache.v)]
    same = cache.k.untyped_storage().data_ptr() == cache.v.untyped_storage().data_ptr()
    return replace(cache, k=found[0], v=cache.v if same else found[1])


class _Flattened(Backend):
    """Writes to the pool's memory from its first element, without the layer's offset."""

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the rows in the first layer of the memory."""
        first = cache.k.as_strided(cache.k.shape, cache.k.stride(), 0)
        super().write_kv(k, v, replace(cache, k=first), batch)


class _FlattenedPlugin(Plugin):
    def open_backend(self, geometry: Geometry, arena: Any) -> Backend:
        return _Flattened(geometry, arena)


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


def _both_scales_or_none(cache: KVCache) -> KVCache:
    if cache.k_scale is None or cache.v_scale is None:
        return replace(cache, k_scale=None, v_scale=None)
    return cache


MUTANTS = (
    Mutant("G01", "Finds V one layer's K after K", "one tensor [2, pages, …] a layer", patch=on_cache(_v_after_k)),
    Mutant("G02", "Drops the layer's offset in the memory of K", "a kernel that takes the storage's address",
           patch=on_cache(_from_the_start)),
    Mutant("G06", "Stores rows in the first layer of the memory", "a kernel that takes the storage's address",
           layouts=("tutorial",), absent="a subclass of the tutorial's backend", plugin=_FlattenedPlugin),
    Mutant("R07", "Computes the soft cap from exponentials, which gives NaN for large logits", "vllm#56579",
           patch=attending(Parts(cap=_exponential_cap))),
    Mutant("R08", "Starts the running maximum of the softmax at -1e4", "flashinfer#4267, flashinfer#4401",
           patch=attending(_from(-1e4))),
    Mutant("R09", "Does not subtract the row maximum in the softmax", "–", patch=attending(Parts(weights=_no_maximum))),
    Mutant("R10", "Rounds scores to q_dtype before the softmax", "–", patch=attending(Parts(weights=_rounded_scores))),
    Mutant("R11", "Rounds partial sums of the output to q_dtype", "–", patch=attending(Parts(values=_rounded_sums))),
    Mutant("R18", "Ignores the soft cap in draft modes", "–", patch=forgets_cap(*DRAFTING)),
    of_tutorial(
        "S01",
        "Keeps q·k in fp16 before it is scaled, so it overflows at 65504",
        "Qwen2's large K biases in fp16 gave inf and '!!!!' in several engines; ordinary random inputs stay below 100",
        opens(HalfLogits),
    ),
    of_tutorial(
        "S02",
        "Uses one softmax maximum for all rows and group heads of a tile",
        "a head or row with small logits next to one with large logits (attention sinks) outputs zero",
        opens(TileMax),
    ),
    of_tutorial(
        "S03",
        "Keeps softmax weights in fp16 with subnormals flushed to zero",
        "even attention over a 20k prompt returns zeros; eager fp16 softmax on hardware that flushes subnormals",
        opens(HalfWeights),
    ),
    of_tutorial(
        "S04",
        "Accepts a logits soft cap in supports and ignores it in the softmax",
        "Gemma 2 with cap 50: random logits near 3 hardly show it, real logits of 60 do",
        CapIgnored,
    ),
    of_tutorial(
        "S15",
        "Ignores the window for a prefill chunk of exactly one token",
        "the last chunk of a prompt, or a decode mixed into prefill, of Gemma, Mistral, gpt-oss",
        opens(LastToken),
    ),
    Mutant("T01", "Skips the soft cap on layers with a window", "Gemma 2 has both", patch=_capless_window),
    Mutant("T02", "Multiplies by k_scale after the soft cap", "the order of fp8 and soft cap",
           patch=_scale_behind_the_cap, **QUANTISED),
    Mutant("T03", "Applies fp8 scales only if both k_scale and v_scale exist", "k_scale without v_scale",
           patch=on_cache(_both_scales_or_none), **QUANTISED),
    Mutant(
        "V46",
        "Uses the softmax scale of head_dim instead of the geometry's scale",
        "ROCm/ATOM#1591",
        patch=shaped(softmax_scale=lambda a: a.head_dim**-0.5),
    ),
    Mutant("V48", "Ignores the soft cap", "ROCm/ATOM#1591", patch=shaped(logits_soft_cap=0.0)),
    Mutant("X05", "Treats a window of 0 as no window", "vllm-ascend#8508",
           patch=shaped(window_left=lambda a: a.window_left or -1)),
    Mutant("X12", "Reverses the KV heads for groups of 3 query heads",
           "sglang#32062", patch=_heads(lambda a: a.group_size == 3)),
    Mutant("X13", "Reverses the KV heads when there are 3",
           "sglang#32062", patch=_heads(lambda a: a.num_kv_heads == 3)),
    Mutant("X14", "Reverses the KV heads for MHA", "sglang#32062", patch=_heads(lambda a: a.group_size == 1)),
    Mutant("X17", "Ignores the soft cap in EXTEND", "ROCm/ATOM#1591", patch=forgets_cap(Mode.EXTEND)),
    Mutant("X18", "Ignores the soft cap in VERIFY", "ROCm/ATOM#1591", patch=forgets_cap(Mode.VERIFY)),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("G01", "G02", "G06", "R10", "S04", "S15"), "numerics.match_float64"),
    **dict.fromkeys(
        ("R07", "R08", "R09", "R11", "R18", "S01", "S02", "S03", "T01", "T02"), "numerics.survive_any_logits"
    ),
    "T03": "numerics.each_scale_counts_alone",
}
