"""Mutants R01 … R28, by outside authors: fixed limits, logits, cached tensors and the order of events.

24 of these mutants survived the suite of contract 1.2. The checks that kill them now test a class of defects, not one
mutant; kills.json lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.batch import ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.graphs import GraphKey, GraphState, Program
from draftmark.tree import VerifyResult

from .mutant import Mutant, after, around, forgets_cap, on_batch, resized
from .plain_attention import Parts, attending
from .rare_sizes import own
from .trees import _walk as walk

Tensor = torch.Tensor
CSR = ("csr",)
NO_FP8 = "the reference serves no quantised KV"
DRAFTING = (Mode.DRAFT, Mode.DRAFT_EXTEND)
_SCALES: dict[tuple[int, ...], float | None] = {}
_WORDS: dict[tuple[int, ...], int] = {}

# -- sizes -----------------------------------------------------------------------------------------------------


def _eight_requests(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
    out[sum(batch.q_lens[:8]) :] = 0


def _keys_below(limit: int) -> Parts:
    return Parts(seen=lambda seen, prefix, shape: seen & (torch.arange(seen.shape[2]) < limit))


def _key_lost(at: int) -> Parts:
    """Hide key `at - 1` of every prefix longer than `at`, like a split-KV kernel that drops a split's last key."""
    return Parts(
        seen=lambda seen, prefix, shape: (
            seen & ~((torch.arange(seen.shape[2]) == at - 1) & (prefix[:, None] > at))[:, None]
        )
    )


def _groups_as_eight(low: int, high: int) -> Parts:
    def heads(shape: Any) -> Tensor:
        group = 8 if low <= shape.group_size <= high else shape.group_size
        return (torch.arange(shape.num_qo_heads) // group).clamp(max=shape.num_kv_heads - 1)

    return Parts(heads=heads)


def _sixteen_heads(shape: Any) -> Tensor:
    head = torch.arange(shape.num_qo_heads)
    return torch.where(head < 16, head // shape.group_size, 0)


def _tile_rounded_up(seen: Tensor, prefix: Tensor, shape: Any) -> Tensor:
    """Round the window's first key up to a multiple of 64 when the prefix has 256 tokens or more."""
    if shape.window_left < 0:
        return seen
    start = (prefix - shape.window_left).clamp(min=0)
    start = torch.where(prefix >= 256, (start + 63) // 64 * 64, 0)
    return seen & (torch.arange(seen.shape[2]) >= start[:, None])[:, None]


def _short_with_both(geometry: Geometry, shape: tuple[int, ...]) -> tuple[int, ...]:
    both = {Mode.VERIFY, Mode.DRAFT} <= set(geometry.modes)
    return (geometry.max_reqs * geometry.draft.topk,) if both else shape


WORKSPACE = 1 << 16


def _partials(backend: Any) -> None:
    """If the context limit exceeds 2,048 tokens, write 4 bytes per output element to a workspace that has fewer."""
    scratch, geometry = backend.arena["scratch"], backend.geometry
    memory = torch.empty(0, dtype=torch.uint8).set_(scratch.untyped_storage())
    start = scratch.storage_offset()

    def write(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        if batch.uniform is not None and geometry.max_pages_per_req * geometry.attention.page_size > 2048:
            memory[start : start + out.numel() * 4].fill_(1)

    after(backend, "attend", write)


def _walks(requests: int, nodes: int) -> Any:
    def call(original: Any, drafts: Tensor, parents: Tensor, targets: Tensor) -> VerifyResult:
        hidden = (torch.arange(drafts.shape[0])[:, None] >= requests) | (torch.arange(drafts.shape[1]) >= nodes)
        found: VerifyResult = original(drafts.masked_fill(hidden, -1), parents, targets)
        return found

    return walk(call)


def _shift_modulo(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Read a mask row as one 64-bit number: slots from 64 on read the bits of slots 0, 1, …"""
    if not isinstance(batch.tail, Tree):
        return batch
    word = torch.arange(batch.tail.mask.shape[1]) % 2
    return replace(batch, tail=Tree(batch.tail.mask[:, word], batch.tail.depth))


def _captures_something(backend: Any) -> None:
    if not backend.geometry.limits.capture_batch_sizes:
        raise RuntimeError("max() arg is an empty sequence")


# -- logits ----------------------------------------------------------------------------------------------------


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


# -- tensors of another layer or geometry ----------------------------------------------------------------------


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


def _noise(q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
    """Add one ulp to random output elements, as atomic additions in a varying order do."""
    up = (torch.rand_like(out.float()) < 0.5).to(out.dtype)
    out.add_(out * up * torch.finfo(out.dtype).eps)


def _int32_in_decode(backend: Any) -> None:
    def call(original: Any, k: Tensor, v: Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        slots = backend.arena["slot_mapping"][: batch.num_rows]
        width, right = cache.k.shape[2] * cache.k.shape[3], slots.clone()
        if batch.mode is Mode.DECODE:
            slots.copy_((slots * width).to(torch.int32).clamp(min=0) // width)
        original(k, v, cache, batch)
        slots.copy_(right)

    around(backend, "write_kv", call)


def _scale_by_heads(backend: Any) -> None:
    """Use the softmax scale of the first geometry with this head shape, from a module-level cache."""
    a = backend.geometry.attention
    scale = _SCALES.setdefault((a.num_qo_heads, a.num_kv_heads, a.head_dim), a.softmax_scale)
    backend.geometry = replace(backend.geometry, attention=replace(a, softmax_scale=scale))


def _words_by_heads(backend: Any) -> None:
    """Use the number of mask words of the first geometry with this head shape, from a module-level cache."""
    a = backend.geometry.attention
    key, own_words = (a.num_qo_heads, a.num_kv_heads, a.head_dim), int(backend.geometry.mask_words)

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        words = _WORDS.setdefault(key, own_words)
        if not isinstance(batch.tail, Tree) or words == own_words:
            return batch
        flat, rows = batch.tail.mask.reshape(-1), torch.arange(batch.num_rows)[:, None]
        index = (rows * words + torch.arange(own_words)).clamp(max=flat.shape[0] - 1)
        return replace(batch, tail=Tree(flat[index], batch.tail.depth))

    on_batch(change)(backend)


# -- order of events -------------------------------------------------------------------------------------------


def _plan_by_lengths(backend: Any) -> None:
    planned: list[tuple[int, ...]] = []

    def call(original: Any, batch: ForwardBatch) -> None:
        if planned != [batch.host.upper_bound()]:
            original(batch)
        planned[:] = [batch.host.upper_bound()]

    around(backend, "plan", call)


def _offsets_by_totals(backend: Any) -> None:
    """Keep the row offsets of EXTEND while the numbers of requests and rows stay equal, even if q_lens change."""
    kept: dict[tuple[int, int], Tensor] = {}

    def change(_: Any, batch: ForwardBatch) -> ForwardBatch:
        if batch.mode is not Mode.EXTEND:
            return batch
        if kept.keys() != {(batch.padded_reqs, batch.num_rows)}:
            kept.clear()
        offsets = kept.setdefault((batch.padded_reqs, batch.num_rows), batch.q_indptr.clone())
        return replace(batch, q_indptr=offsets)

    on_batch(change, "write_metadata")(backend)


def _filed_by_rows(geometry: Geometry, state: GraphState) -> GraphState:
    """Look up captured graphs by their number of rows, so DECODE and DRAFT graphs of equal rows are confused."""
    each = {Program.DECODE: 1, Program.DRAFT: geometry.draft.topk}
    files: dict[int, GraphKey] = {}
    outputs: dict[GraphKey, Any] = {}
    capture, replay = state.capture, state.replay

    def rows(key: GraphKey) -> int:
        return int(each.get(key.program, geometry.draft.num_draft_tokens) * key.batch_size)

    def captured(key: GraphKey, step: Any) -> Any:
        outputs[key] = capture(key, step)
        files[rows(key)] = key
        return outputs[key]

    def replayed(key: GraphKey) -> Any:
        replay(files.get(rows(key), key))
        return outputs[key]

    state.capture, state.replay = captured, replayed  # type: ignore[method-assign]
    return state


def _attends(parts: Parts) -> Any:
    return attending(parts)


def _mutant(name: str, what: str, bug: str, **how: Any) -> Mutant:
    return Mutant(name, what, f"outside author; {bug}" if bug else "outside author", **how)


TREES = {"layouts": ("reference",), "absent": "tree operations do not depend on the layout"}
QUANTISED = {"layouts": CSR, "absent": NO_FP8}
MUTANTS = (
    _mutant("R01", "Leaves the output of requests after the eighth at zero", "llm-scaler#368",
            patch=lambda b: after(b, "attend", _eight_requests)),
    _mutant("R02", "Ignores keys from the 1024th on", "llm-scaler#368", patch=_attends(_keys_below(1024))),
    _mutant("R03", "Loses the last key before a split at 512 keys", "", patch=_attends(_key_lost(512))),
    _mutant("R03b", "Loses the last key before a split at 128 keys", "", patch=_attends(_key_lost(128))),
    _mutant("R04", "Maps query heads as if groups of 5 to 7 had 8 heads",
            "flashinfer#4316", patch=_attends(_groups_as_eight(5, 7))),
    _mutant("R05", "Maps query heads as if groups of 16 or more had 8 heads", "flashinfer#3563, vllm#40792",
            patch=_attends(_groups_as_eight(16, 999))),
    _mutant("R06", "Lets query heads from the 17th on read the first KV head", "",
            patch=_attends(Parts(heads=_sixteen_heads))),
    _mutant("R07", "Computes the soft cap from exponentials, which gives NaN for large logits", "vllm#56579",
            patch=_attends(Parts(cap=_exponential_cap))),
    _mutant("R08", "Starts the running maximum of the softmax at -1e4", "flashinfer#4267, flashinfer#4401",
            patch=_attends(_from(-1e4))),
    _mutant("R09", "Does not subtract the row maximum in the softmax", "", patch=_attends(Parts(weights=_no_maximum))),
    _mutant("R10", "Rounds scores to q_dtype before the softmax", "", patch=_attends(Parts(weights=_rounded_scores))),
    _mutant("R11", "Rounds partial sums of the output to q_dtype", "", patch=_attends(Parts(values=_rounded_sums))),
    _mutant("R12", "Reads the first layer's KV cache in all layers", "TRT-LLM#16801", patch=_first_cache),
    _mutant("R13", "Uses the first layer's fp8 scales in all layers", "vllm#25513", patch=_first_scales, **QUANTISED),
    _mutant("R14", "Reads fp8 scales on the host in every step", "", patch=_scales_on_the_host, **QUANTISED),
    _mutant("R15", "Returns outputs that differ from run to run",
            "sglang#10278", patch=lambda b: after(b, "attend", _noise)),
    _mutant("R16", "Skips the plan while lengths are unchanged, even if the mode changes", "", patch=_plan_by_lengths),
    _mutant("R17", "Computes element offsets in 32 bits in DECODE", "vllm#47671", patch=_int32_in_decode),
    _mutant("R18", "Ignores the soft cap in draft modes", "", patch=forgets_cap(*DRAFTING)),
    _mutant("R19", "Rounds a window's first tile up when the prefix has 256 tokens or more", "",
            patch=_attends(Parts(seen=_tile_rounded_up))),
    _mutant("R20", "Raises in open_backend when no graph size is captured", "", patch=_captures_something),
    _mutant("R21", "Sizes the slot mapping too small for a geometry with VERIFY and DRAFT", "",
            hooks=resized("slot_mapping", _short_with_both)),
    _mutant("R22", "Declares a fixed workspace of 64 KiB, which usage() repeats", "vllm#40383, sglang#14173",
            hooks=own(lambda g: WORKSPACE, lambda g, x: WORKSPACE), patch=_partials),
    _mutant("R23", "Ignores requests after the eighth in verify_tree", "", hooks=_walks(8, 1000), **TREES),
    _mutant("R23b", "Ignores nodes after the 96th in verify_tree", "", hooks=_walks(1000, 96), **TREES),
    _mutant("R24", "Looks up graphs by their number of rows only", "vllm#26499", hooks={"graph_state": _filed_by_rows}),
    _mutant("R25", "Caches the softmax scale in a global by head shape", "flashinfer#4014", patch=_scale_by_heads),
    _mutant("R26", "Caches the number of mask words in a global by head shape",
            "flashinfer#4014", patch=_words_by_heads),
    _mutant("R27", "Shifts mask words modulo 64", "", patch=on_batch(_shift_modulo)),
    _mutant("R28", "Keeps EXTEND's row offsets while the numbers of requests and rows are unchanged",
            "vllm-ascend#5711", patch=_offsets_by_totals),
)  # fmt: skip


KILLER = {
    **{name: "production.a_crowd_is_right" for name in ("R01", "R02", "R03", "R19")},
    "R03b": "production.a_crowd_is_right",
    **{name: "production.every_head_shape_is_right" for name in ("R04", "R05", "R06")},
    **{name: "numerics.survive_any_logits" for name in ("R07", "R08", "R09", "R18")},
    "R10": "numerics.match_float64",
    "R11": "numerics.survive_any_logits",
    **{name: "layers.have_their_own_caches_in_a_graph" for name in ("R12", "R13")},
    "R14": "layers.have_their_own_caches_in_a_graph",
    "R15": "repeats.give_the_same_bits",
    "R16": "graphs.programs_do_not_disturb_each_other",
    "R17": "numerics.reach_past_int32",
    "R20": "metadata.decodes_to_the_token_history",
    "R21": "sizing.covers",
    "R22": "production.a_crowd_is_right",
    **{name: "tree_ops.walk_follows_the_target" for name in ("R23", "R23b")},
    "R24": "graphs.keys_are_closed_under_padding",
    **{name: "memory.of_geometries_that_differ_is_apart" for name in ("R25", "R26")},
    "R27": "production.wide_tails_are_right",
    "R28": "history.equals_a_fresh_state",
}
"""Check that must kill each mutant."""
