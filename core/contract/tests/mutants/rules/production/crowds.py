"""Mutants that checks of `production` kill: crowds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Form, Geometry, Mode
from draftmark.runtime import Arena, Causal, ForwardBatch, KVCache
from draftmark_contract.profiles import FP8_DTYPE

from ...designs.layouts import CSR, REFERENCE, in_layouts, of_tutorial
from ...designs.plain_attention import Parts, attending, right_cap
from ...designs.tutorial import Backend
from ...designs.tutorial_parts import TutorialParts, opens, with_parts
from ...designs.tutorial_plans import Planned, plugin
from ...designs.workspaces import own
from ...mutant import Mutant, after, around, on_batch, shaped


class LogBase(TutorialParts):
    """Splits KV into parts of 1024 keys; computes the log-sum-exps with base e, but combines them with base 2."""

    SPLIT = 1024

    def weights(self, scores: Tensor, seen: Tensor) -> Tensor:
        width = scores.shape[-1]
        masked = scores.masked_fill(~seen, float("-inf"))
        masked = torch.nn.functional.pad(masked, (0, -width % self.SPLIT), value=float("-inf"))
        splits = masked.unflatten(-1, (-1, self.SPLIT))
        lse = splits.logsumexp(-1, keepdim=True)
        part = (splits - torch.where(lse.isinf(), 0.0, lse)).exp()
        share = torch.exp2(lse - lse.amax(-2, keepdim=True))
        return (part * share / share.sum(-2, keepdim=True)).flatten(-2)[..., :width]


class RoundedDistance(TutorialParts):
    """Computes window distances from positions in q's dtype: bf16 counts exactly to 256, fp16 to 2048."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        dtype = getattr(torch, self.shape.q_dtype)
        return row.to(dtype).float() - key.to(dtype).float() <= self.window


class Cascade(TutorialParts):
    """Ignores the window in a prefix of 256 or more tokens that 8 or more requests share (cascade attention)."""

    def in_window(self, batch: ForwardBatch, rows: slice, row: Tensor, key: Tensor) -> Tensor:
        inside = super().in_window(batch, rows, row, key)
        table = batch.page_table
        if len(table) < 8:
            return inside
        shared = (table == table[:1]).all(0).int().cumprod(0).sum() * self.shape.page_size
        shared = torch.minimum(shared, batch.prefix_lens.min())
        return inside | ((shared >= 256) & (key < shared))


class GridLimit(Backend):
    """Launches one block per row and head in gridDim.y: beyond 65535 the launch fails and `out` stays unwritten."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.num_rows * self.shape.num_qo_heads <= 65535:
            super().attend(q, cache, batch, out)


def _tile_rounded_up(seen: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    """Round the window's first key up to a multiple of 64 when the prefix has 256 tokens or more."""
    if shape.window_left < 0:
        return seen
    start = (prefix - shape.window_left).clamp(min=0)
    start = torch.where(prefix >= 256, (start + 63) // 64 * 64, 0)
    return seen & (torch.arange(seen.shape[2]) >= start[:, None])[:, None]


WORKSPACE = 1 << 16


def _partials(backend: Any) -> None:
    """If the context limit exceeds 2,048 tokens, write 4 bytes per output element to a workspace that has fewer."""
    scratch, geometry = backend.arena["scratch"], backend.geometry
    memory = torch.empty(0, dtype=torch.uint8).set_(scratch.untyped_storage())
    start = scratch.storage_offset()

    def write(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.uniform and geometry.max_pages_per_req * geometry.attention.page_size > 2048:
            memory[start : start + out.numel() * 4].fill_(1)

    after(backend, "attend", write)


def _scaled_for(keys: int) -> Callable[[Any], None]:
    """Return a patch that applies the scale of fp8 values only to the first `keys` keys of a request."""

    def patch(backend: Any) -> None:
        if backend.geometry.attention.kv_dtype != FP8_DTYPE:
            return

        def values(weights: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
            part = torch.cat((v[:, :keys], v[:, keys:] / 2), 1)
            return torch.einsum("rhqk,rkhd->rqhd", weights, part)

        attending(Parts(values=values))(backend)

    return patch


def _capped_for(requests: int) -> Parts:
    """Return attention that applies the soft cap only to the first `requests` requests of a batch."""
    return Parts(cap=lambda scores, cap: torch.cat((right_cap(scores[:requests], cap), scores[requests:])))


def _clamps(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Clamp lengths that exceed the context limit, in batches of more than 16 requests."""
    limits = backend.geometry.limits
    if not limits.overshoots or batch.padded_reqs <= 16:
        return batch
    return replace(batch, prefix_lens=batch.prefix_lens.clamp(max=limits.max_context_len))


def _causal_past(keys: int, mode: Mode) -> Callable[[Any, ForwardBatch], ForwardBatch]:
    """Return a change of the batch: a causal tail in place of a tree or block if a request may have more keys."""

    def change(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        long = batch.mode is mode and max(batch.host.upper_bound(), default=0) > keys
        return replace(batch, tail=Causal()) if long else batch

    return change


def _swaps_strided(backend: Any) -> None:
    """Read the halves of a strided page in the wrong order, for pages of 32 and 64 tokens."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        size = backend.geometry.attention.page_size
        if Form.STRIDED_KV in backend.geometry.forms and size in (32, 64):
            cache = replace(cache, v=cache.v.roll(size // 2, 1))
        original(q, cache, batch, out)

    around(backend, "attend", call)


class OneWordWhenLong(TutorialParts):
    """Reads one mask word for requests with more than 512 committed tokens."""

    def tree_bits(self, words: Tensor, slot: Tensor, depth: Tensor, prefix: Tensor) -> Tensor:
        seen = super().tree_bits(words, slot, depth, prefix)
        return seen & (slot < 32) if int(prefix) > 512 else seen


def _repeats_rows(backend: Any) -> None:
    """Write rows from the 8,193rd on from the rows before them, as a grid of limited size does."""

    def call(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        original(q, cache, batch, out)
        out[2**13 :] = out[: max(0, out.shape[0] - 2**13)].clone()

    around(backend, "attend", call)


def _half_offsets(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, q_indptr=batch.q_indptr.half().int())


class GrownWorkspace(Planned):
    """Reallocates a workspace outside the arena for larger eager batches, but captured graphs read the old one."""

    def own_bounds(self, geometry: Geometry, arena: Arena) -> torch.Tensor:
        self.retired: list[torch.Tensor] = []
        size = max(geometry.limits.capture_batch_sizes, default=geometry.max_reqs)
        return torch.zeros(size, dtype=torch.int32, device=arena["slots"].device)

    def plan(self, batch: ForwardBatch) -> None:
        if batch.padded_reqs > len(self.bounds):
            self.retired.append(self.bounds)  # captured graphs still read the old tensor
            self.bounds = torch.zeros(2 * batch.padded_reqs, dtype=torch.int32, device=self.bounds.device)
        super().plan(batch)


def _short_prompts(backend: Any) -> None:
    """Compute 640 rows of a prompt, the most that one launch has tiles for."""

    after(backend, "attend", lambda q, cache, batch, out, *lse: _clear_rows(batch, out, 640))


def _short_latent_prompts(backend: Any) -> None:
    """Compute 512 rows of a prompt over latent rows."""
    if backend.geometry.attention.latent:
        after(backend, "attend", lambda q, cache, batch, out, *lse: _clear_rows(batch, out, 512))


def _clear_rows(batch: ForwardBatch, out: torch.Tensor, most: int) -> None:
    first = 0
    for rows in batch.q_lens if batch.mode is Mode.EXTEND else ():
        out[first + most : first + rows] = 0
        first += rows


class ShortPrompts(TutorialParts):
    """Masks a prompt causally in blocks of 1,024 rows, and gives later rows the mask of the first block."""

    def attend(self, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        super().attend(q, cache, batch, out)
        first = 0
        for rows in batch.q_lens if batch.mode is Mode.EXTEND else ():
            out[first + 1024 : first + rows] = out[first : first + max(0, rows - 1024)]
            first += rows


def _modules_up_to_512(backend: Any) -> None:
    """Halve the output of DRAFT_EXTEND with several modules after 512 committed tokens."""

    def attend(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        original(q, cache, batch, out)
        if batch.mode is Mode.DRAFT_EXTEND and backend.geometry.draft.num_modules > 1:
            far = (batch.prefix_lens > 512).repeat_interleave(batch.q_lens[0])
            out[: len(far)] = torch.where(far[:, None, None], out[: len(far)] / 2, out[: len(far)])

    around(backend, "attend", attend)


MUTANTS = (
    Mutant("F18", "Leaves rows of a prompt after the 640th without an output", "launches with a fixed number of tiles",
           patch=_short_prompts),
    Mutant("F21", "Leaves rows of a prompt over latent rows after the 512th without an output", "a number of tiles",
           patch=_short_latent_prompts, layouts=REFERENCE, absent="only reference serves latent rows"),
    with_parts("F19", "Repeats output rows of a prompt after the 1,024th", ShortPrompts),
    Mutant("F20", "Loses half of the output of several MTP modules after 512 committed tokens", "a mask of front rows",
           patch=_modules_up_to_512),
    in_layouts("F03", "Repeats output rows after the 8,192nd", CSR, _repeats_rows),
    in_layouts("F11", "Scales fp8 values only up to the 1,024th key", CSR, _scaled_for(1024), "flashinfer#3864"),
    in_layouts("F12", "Applies the soft cap only to the first eight requests", CSR, attending(_capped_for(8))),
    in_layouts("F13", "Clamps overshot lengths in batches of more than 16 requests", CSR, on_batch(_clamps)),
    with_parts("F14", "Reads one mask word after more than 512 committed tokens", OneWordWhenLong),
    in_layouts("F15", "Makes a draft block causal after more than 1,024 committed tokens", REFERENCE,
               on_batch(_causal_past(1024, Mode.DRAFT_BLOCK)), "vllm#54374"),
    in_layouts("F16", "Makes a ragged verify causal after more than 512 committed tokens", REFERENCE,
               on_batch(_causal_past(512, Mode.RAGGED_VERIFY)), "flashinfer#4382"),
    in_layouts("F17", "Exchanges the halves of strided pages of 32 and 64 tokens", REFERENCE, _swaps_strided),
    Mutant("OK6", "Leaves out the soft cap in groups of eight query heads and more", "Gemma's cap in other groups",
           patch=shaped(logits_soft_cap=lambda a: a.logits_soft_cap if a.group_size < 8 else 0.0),
           layouts=("csr",), absent="tried in csr"),
    Mutant("R19", "Rounds a window's first tile up when the prefix has 256 tokens or more", "–",
           patch=attending(Parts(seen=_tile_rounded_up))),
    Mutant("R22", "Declares a fixed workspace of 64 KiB, which usage() repeats", "vllm#40383, sglang#14173",
           hooks=own(lambda g: WORKSPACE, lambda g, x: WORKSPACE), patch=_partials),
    of_tutorial(
        "S05",
        "Combines base-e LSEs with exp2 when there are more than 1024 keys",
        "FlashInfer's LSE has base 2, FlashAttention's base e; nearly right if all splits have equal weight",
        opens(LogBase),
    ),
    of_tutorial(
        "S08",
        "Computes window distances in the dtype of q",
        "arange in bf16 as in HF's RoPE bug; a window model in bf16 after position 256",
        opens(RoundedDistance),
    ),
    of_tutorial(
        "S16",
        "Ignores the window in cascade attention over a shared prefix (8 requests, 256 tokens)",
        "vLLM's cascade heuristics with a sliding window; needs requests that share pages",
        opens(Cascade),
    ),
    of_tutorial(
        "S18",
        "Writes no output when rows × heads exceed gridDim.y = 65535",
        "2048 prefill rows × 32 heads are one more than fits, and the launch error is ignored",
        opens(GridLimit),
    ),
    of_tutorial(
        "S36",
        "Reallocates a workspace for a large eager batch, while graphs read the old one",
        "workspace resize after capture (vLLM, TensorRT-LLM)",
        plugin(GrownWorkspace),
    ),
    Mutant("T08", "Computes row offsets in float16", "index arithmetic in q's dtype",
           patch=on_batch(_half_offsets, "write_metadata")),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(("F18", "F19"), "production.a_prompt_is_right"),
    "F20": "production.several_modules_are_right",
    "F21": "latent.a_crowd_is_right",
    **dict.fromkeys(("F03", "S18", "T08"), "production.many_rows_are_right"),
    **dict.fromkeys(
        ("F11", "F12", "F13", "F14", "F15", "F16", "F17", "OK6", "R19", "R22", "S05", "S08"),
        "production.a_crowd_is_right",
    ),
    "S16": "production.a_common_prefix_is_right",
    "S36": "production.large_graphs_and_larger_batches",
}
