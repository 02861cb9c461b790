"""Mutants that the checks of `padding` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark import Mode
from draftmark.runtime import Causal, ForwardBatch, Tree, Unknown

from ..designs.changes import FIRST, bits, key_lost, on_host_lengths, on_queries, on_tail, words
from ..designs.plain_attention import Parts, attending
from ..mutant import Mutant, after, around, on_batch, shaped


def _reversed(batch: ForwardBatch) -> Tree:
    return Tree(words(bits(batch.tail.mask).flip(-1)), batch.tail.depth)


def _shifted(batch: ForwardBatch) -> Tree:
    return Tree(words(bits(batch.tail.mask).flatten(1).roll(1, 1).view(*batch.tail.mask.shape, 32)), batch.tail.depth)


def _chain_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, torch.arange(batch.tail.depth.shape[1], dtype=torch.int32).expand_as(batch.tail.depth))


def _same_rows(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask[:1].expand_as(batch.tail.mask).contiguous(), batch.tail.depth)


def _causal(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, tail=Causal())


def _deeper(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, batch.tail.depth + 1)


def _all_tail(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Let each DRAFT_EXTEND row see all new tokens of its request, also later ones."""
    if batch.mode is not Mode.DRAFT_EXTEND:
        return batch
    rows, tail = batch.num_rows, batch.tail_lens[0]
    unpacked = (torch.arange(backend.geometry.mask_words * 32) < tail).view(1, -1, 32).expand(rows, -1, 32)
    depth = torch.arange(tail, dtype=torch.int32).expand(batch.padded_reqs, tail)
    return replace(batch, tail=Tree(words(unpacked), depth))


def _chain_in_draft(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
        return batch
    depth = torch.arange(batch.tail.depth.shape[1], dtype=torch.int32).expand_as(batch.tail.depth)
    return replace(batch, tail=Tree(batch.tail.mask, depth))


def _all_branches(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT or batch.step == 0 or not isinstance(batch.tail, Tree):
        return batch
    count, slots = batch.tail_lens[0], torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32)
    own = bits(batch.tail.mask) | (slots < count - batch.q_lens[0])
    return replace(batch, tail=Tree(words(own), batch.tail.depth))


def _siblings(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """In draft step 0, let each branch also see the tail slots of the branches before it."""
    if batch.mode is not Mode.DRAFT or batch.step or not isinstance(batch.tail, Tree):
        return batch
    each = batch.q_lens[0]
    own = torch.arange(batch.num_rows) % each
    seen = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) <= own[:, None, None]
    return replace(batch, tail=Tree(words(seen), batch.tail.depth))


def _late_chain(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """If a batch has one live request, replace its draft tree by a chain."""
    return replace(batch, tail=Causal()) if batch.mode is Mode.VERIFY and batch.num_reqs == 1 else batch


def _empty_out(backend: Any) -> None:
    """Write zeros for DECODE rows with an empty prefix, as kernels do for rows without keys."""

    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        if batch.mode is Mode.DECODE:
            out.masked_fill_((batch.prefix_lens == 0)[:, None, None], 0.0)

    after(backend, "attend", call)


def _stride_of_verify(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    """Look up the mask rows of a draft step with the row stride of VERIFY (D rows per request)."""
    if batch.mode is not Mode.DRAFT or not isinstance(batch.tail, Tree):
        return batch
    request = torch.arange(batch.num_rows) // batch.q_lens[0]
    row = request * backend.geometry.draft.num_draft_tokens + torch.arange(batch.num_rows) % batch.q_lens[0]
    return replace(batch, tail=Tree(batch.tail.mask[row.clamp(max=batch.num_rows - 1)], batch.tail.depth))


def _null_slots(backend: Any) -> None:
    """Write padded rows to slot 0 and ignore their page table."""
    original = backend.write_metadata

    def write(batch: Any) -> None:
        original(batch)
        pad = (
            (batch.prefix_lens == 0)
            & (batch.page_table[:, 0] < 64)
            & (batch.page_table[:, 0] == batch.page_table[:, -1])
        )
        if batch.uniform:
            rows = pad.repeat_interleave(batch.q_lens[0], output_size=batch.num_rows)
            backend.arena["slot_mapping"][: batch.num_rows].masked_fill_(rows, 0)

    backend.write_metadata = write


def _heads(backend: Any) -> torch.Tensor:
    a = backend.geometry.attention
    return torch.arange(a.num_qo_heads).view(-1, a.num_kv_heads).t().reshape(-1)


def _swaps_kv(backend: Any) -> None:
    def call(original: Any, k: Any, v: Any, cache: Any, batch: ForwardBatch) -> None:
        original(*((v, k) if batch.mode is Mode.EXTEND else (k, v)), cache, batch)

    around(backend, "write_kv", call)


def _live_out(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        whole = torch.zeros_like(out)
        original(q, cache, batch, whole)
        live = sum(batch.q_lens[: batch.num_reqs])
        out[:live] = whole[:live]

    around(backend, "attend", call)


def _accumulates(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: Any, out: torch.Tensor) -> None:
        part = torch.zeros_like(out)
        original(q, cache, batch, part)
        out.mul_(0).add_(part)

    around(backend, "attend", call)


def _nan_times_zero(backend: Any) -> None:
    """Add the last page's V times zero to the output, so NaN in unused slots reaches it."""

    def call(original: Any, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
        original(q, cache, batch, out)
        size = backend.geometry.attention.page_size
        last = backend.arena["slot_mapping"][: batch.num_rows] // size
        out.add_(cache.v[last].sum((1, 2))[:, None].to(out.dtype) * 0)

    around(backend, "attend", call)


def _consumes(backend: Any) -> None:
    """Set the slot mapping to 0 after attend, so the next layer finds no metadata."""
    after(backend, "attend", lambda q, cache, batch, out: backend.arena["slot_mapping"][: batch.num_rows].fill_(0))


def _one_head(backend: Any) -> None:
    def call(original: Any, q: Any, cache: Any, batch: Any, out: Any) -> None:
        first = (pool[:, :, :1].expand_as(pool).contiguous() for pool in (cache.k, cache.v))
        original(q, type(cache)(*first), batch, out)

    around(backend, "attend", call)


def _nan_padding(backend: Any) -> None:
    def call(q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        out[sum(batch.q_lens[: batch.num_reqs]) :] = float("nan")

    after(backend, "attend", call)


def _first_group(shape: Any) -> Tensor:
    """Map query heads with the group size of the first geometry that the process opened."""
    group = FIRST.setdefault("group", shape.group_size)
    return (torch.arange(shape.num_qo_heads) // group).clamp(max=shape.num_kv_heads - 1)


def _weighs_the_tile(scores: Tensor, shape: Any) -> Tensor:
    """Give keys from the request's length to the end of a tile of 128 the logit 0 instead of -inf, and value 0."""
    place = torch.arange(1, scores.shape[-1] + 1)
    length = torch.where(scores.isfinite(), place, 0).amax((1, 2, 3), keepdim=True)
    top = scores.amax(-1, keepdim=True).clamp(min=0)
    weights = (scores - top).exp()
    return weights / (weights.sum(-1, keepdim=True) + (-length % 128) * (-top).exp())


def _bits_shifted(q: Tensor, cache: Any, batch: ForwardBatch, out: Tensor) -> None:
    """When the batch has padding, give each live request the output of the previous request."""
    if batch.uniform and batch.num_reqs < batch.padded_reqs:
        live = batch.num_reqs * batch.q_lens[0]
        out[:live] = out[:live].roll(batch.q_lens[0], 0)


def _no_plan(backend: Any) -> None:
    backend.plan = lambda batch: None


def _zero_unknown(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, host=Unknown(batch.num_reqs, 0)) if isinstance(batch.host, Unknown) else batch


MUTANTS = (
    Mutant("M23", "Forwards every method except plan", "sglang#30846", patch=_no_plan),
    Mutant("M35", "Maps query heads by the head group of the process's first geometry", "vllm#53002",
           patch=attending(Parts(heads=_first_group))),
    Mutant("M37", "Gives keys after the length weight exp(0) up to the end of a tile", "vllm#57432",
           patch=attending(Parts(weights=_weighs_the_tile))),
    Mutant("M38", "Shifts the outputs of live rows by one request when there is padding", "vllm#54893",
           patch=lambda b: after(b, "attend", _bits_shifted)),
    Mutant("R03b", "Loses the last key before a split at 128 keys", "–", patch=attending(key_lost(128))),
    Mutant("V10", "Reverses the bits of each mask word", "TRT-LLM#13006", patch=on_tail(_reversed)),
    Mutant("V11", "Shifts the mask bits by one slot", "TRT-LLM#13006", patch=on_tail(_shifted)),
    Mutant("V13", "Gives all rows the mask of the first row", "sglang#32920", patch=on_tail(_same_rows)),
    Mutant(
        "V15",
        "Ignores the tree mask and treats the tail as causal",
        "sglang#32920",
        patch=on_batch(_causal, "write_metadata", "attend"),
    ),
    Mutant("V16", "Measures the window in slots instead of positions", "tokenspeed#613", patch=on_tail(_chain_depth)),
    Mutant(
        "V17",
        "Makes the window one token too long",
        "tokenspeed#613",
        patch=shaped(window_left=lambda a: a.window_left + (a.window_left >= 0)),
    ),
    Mutant(
        "V18",
        "Makes the window one token too short",
        "tokenspeed#613",
        patch=shaped(window_left=lambda a: max(a.window_left - 1, -1)),
    ),
    Mutant("V19", "Ignores the window", "vllm-ascend#8508", patch=shaped(window_left=-1)),
    Mutant("V35", "Leaves the output of padded rows unwritten", "vllm#56922", patch=_live_out),
    Mutant("V36", "Adds to the output buffer instead of writing it", "vllm-plugin-FL#429", patch=_accumulates),
    Mutant("V38", "Multiplies NaN of unused V slots by zero", "vllm#43961", patch=_nan_times_zero),
    Mutant("V39", "Overwrites the metadata in the first layer's attend", "flashinfer#3582", patch=_consumes),
    Mutant("V41", "Swaps K and V in EXTEND", "sglang#31367", patch=_swaps_kv),
    Mutant(
        "V44",
        "Maps query heads to KV heads with groups and heads exchanged",
        "sglang#32062",
        patch=on_queries(lambda b, q: q[:, _heads(b)], lambda b, out: out[:, _heads(b).argsort()]),
    ),
    Mutant("V45", "Does not apply the softmax scale", "ROCm/ATOM#1591", patch=shaped(softmax_scale=1.0)),
    Mutant(
        "V47",
        "Applies the soft cap before the softmax scale",
        "ROCm/ATOM#1591",
        patch=shaped(logits_soft_cap=lambda a: a.logits_soft_cap * a.softmax_scale),
    ),
    Mutant(
        "V50",
        "Rounds queries to 8-bit floats",
        "vllm#34043",
        patch=on_queries(lambda b, q: q.to(torch.float8_e4m3fn).to(q.dtype)),
    ),
    Mutant(
        "V56",
        "Reads the rows in reverse order",
        "TRT-LLM#13081",
        patch=on_queries(lambda b, q: q.flip(0), lambda b, out: out),
    ),
    Mutant(
        "V64",
        "Applies no causal mask in DRAFT_EXTEND",
        "flashinfer#1028",
        patch=on_batch(_all_tail, "attend"),
        layouts=("reference",),
        absent="its kernel is causal in that mode and reads no mask",
    ),
    Mutant("V65", "Counts depths from one", "tokenspeed#613", patch=on_tail(_deeper)),
    Mutant("V67", "Lets all query heads read the first KV head", "sglang#32062", patch=_one_head),
    Mutant("V71", "Writes NaN to the output of padded rows", "vllm#37442", patch=_nan_padding),
    Mutant("W62", "Requires unique slots and writes shared null pages", "lmdeploy#4569",
           {"requirements": lambda g, found: replace(found, unique_slots=True)},
           patch=lambda b: _null_slots(b)),
    Mutant("W78", "Treats unknown lengths as 0", "sglang#26738", patch=on_host_lengths(_zero_unknown)),
    Mutant("X07", "Measures the window in slots instead of positions in DRAFT",
           "tokenspeed#613", patch=on_batch(_chain_in_draft)),
    Mutant("X08", "Lets later draft steps see all branches", "sglang#32920", patch=on_batch(_all_branches)),
    Mutant("X09", "Lets branches of the first draft step see each other", "sglang#32920", patch=on_batch(_siblings)),
    Mutant("X11", "Reads the tree as a chain when one request is live", "sglang#32920",
           patch=on_batch(_late_chain, "write_metadata", "attend")),
    Mutant("X38", "Returns zeros for rows with an empty prefix", "sglang#1779", patch=_empty_out),
    Mutant("Z09", "Looks up the mask of draft rows with the stride of VERIFY", "sglang#27545",
           patch=on_batch(_stride_of_verify, "write_metadata", "attend")),
)  # fmt: skip
KILLER = dict.fromkeys(("R03b",), "production.a_crowd_is_right")
