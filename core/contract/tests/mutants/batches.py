"""Mutants that read the batch wrongly: lengths, modes, steps, padding, masks, windows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from draftmark import Mode
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.graphs import is_recording

from .mutant import Mutant, on_batch, shaped


def prefix(change: Any, *modes: Mode, methods: tuple[str, ...] = ()) -> Any:
    """Return a patch that changes the prefix lengths, in some modes or in every mode."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        if modes and batch.mode not in modes:
            return batch
        return replace(batch, prefix_lens=change(backend, batch))

    return on_batch(see, *(methods or ("write_metadata", "attend")))


def tail(change: Any) -> Any:
    """Return a patch that changes the mask or the depths of the draft tree, if the batch has a tree."""

    def see(backend: Any, batch: ForwardBatch) -> ForwardBatch:
        return replace(batch, tail=change(batch)) if isinstance(batch.tail, Tree) else batch

    return on_batch(see, "write_metadata", "attend")


def bits(mask: torch.Tensor) -> torch.Tensor:
    """Unpack int32 words ``[rows, words]`` into bool ``[rows, words, 32]``."""
    return (mask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1 == 1


def words(unpacked: torch.Tensor) -> torch.Tensor:
    """Pack bool ``[rows, words, 32]`` into int32 words; the inverse of `bits`."""
    weights = torch.bitwise_left_shift(torch.ones(32, dtype=torch.int64, device=unpacked.device), torch.arange(32))
    return (unpacked.long() * weights).sum(-1).to(torch.int32)


def _reversed(batch: ForwardBatch) -> Tree:
    return Tree(words(bits(batch.tail.mask).flip(-1)), batch.tail.depth)


def _high_bits(batch: ForwardBatch) -> Tree:
    above = torch.arange(batch.tail.mask.shape[1] * 32).view(-1, 32) >= batch.tail_lens[0]
    return Tree(words(bits(batch.tail.mask) | above), batch.tail.depth)


def _shifted(batch: ForwardBatch) -> Tree:
    return Tree(words(bits(batch.tail.mask).flatten(1).roll(1, 1).view(*batch.tail.mask.shape, 32)), batch.tail.depth)


def _chain_depth(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask, torch.arange(batch.tail.depth.shape[1], dtype=torch.int32).expand_as(batch.tail.depth))


def _same_rows(batch: ForwardBatch) -> Tree:
    return Tree(batch.tail.mask[:1].expand_as(batch.tail.mask).contiguous(), batch.tail.depth)


def _one_word(batch: ForwardBatch) -> Tree:
    mask = torch.zeros_like(batch.tail.mask)
    mask[:, 0] = batch.tail.mask[:, 0]
    return Tree(mask, batch.tail.depth)


def _causal(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    return replace(batch, tail=Causal())


def _step_zero(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    if batch.mode is not Mode.DRAFT:
        return batch
    tails = (backend.geometry.draft.topk,) * batch.padded_reqs
    kept = batch.tail if isinstance(batch.tail, Causal) else Tree(batch.tail.mask, batch.tail.depth[:, : tails[0]])
    return replace(batch, step=0, tail_lens=tails, tail=kept)


def live_only(backend: Any, batch: ForwardBatch) -> ForwardBatch:
    n = batch.num_reqs
    rows = sum(batch.q_lens[:n])
    kept = batch.tail if isinstance(batch.tail, Causal) else Tree(batch.tail.mask[:rows], batch.tail.depth[:n])
    if n == 0:
        return batch
    return replace(
        batch,
        prefix_lens=batch.prefix_lens[:n],
        q_indptr=batch.q_indptr[: n + 1],
        page_table=batch.page_table[:n],
        positions=batch.positions[:rows],
        q_lens=batch.q_lens[:n],
        tail_lens=batch.tail_lens[:n],
        tail=kept,
    )


def _indptr(change: Any) -> Any:
    return on_batch(lambda b, batch: replace(batch, q_indptr=change(b, batch)), "write_metadata")


def _even(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    """Compute row offsets as if all requests had the same number of rows."""
    each = max(1, batch.num_rows // batch.padded_reqs)
    return (torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * each).clamp(max=batch.num_rows)


def _stride_of_steps(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    if batch.mode is not Mode.DRAFT_EXTEND:
        return batch.q_indptr
    return torch.arange(batch.padded_reqs + 1, dtype=torch.int32) * (backend.geometry.draft.num_steps + 1)


def _sentinel_at_capture(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    return -batch.q_indptr if is_recording() else batch.q_indptr


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


def _table(change: Any) -> Any:
    return on_batch(lambda b, batch: replace(batch, page_table=change(b, batch)), "write_metadata", "attend")


def _narrow(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    """Clamp page columns after the context limit to the last column before it."""
    a = backend.geometry.attention
    last = -(-backend.geometry.limits.max_context_len // a.page_size) - 1
    return batch.page_table[:, torch.arange(batch.page_table.shape[1]).clamp(max=last)]


def _padding_on_live(backend: Any, batch: ForwardBatch) -> torch.Tensor:
    pad = (batch.prefix_lens == 0) & (batch.page_table[:, 0] == 0)
    return torch.where(pad[:, None], batch.page_table[:1], batch.page_table)


def _t(batch: ForwardBatch) -> torch.Tensor:
    return torch.tensor(0, dtype=torch.int32) + (batch.tail_lens[0] if batch.uniform else 0)


MUTANTS = (
    Mutant(
        "M11", "Computes row offsets of a ragged prefill as if it were uniform", "sglang#21987", patch=_indptr(_even)
    ),
    Mutant("M12", "Computes row offsets with stride num_steps + 1", "sglang#27545", patch=_indptr(_stride_of_steps)),
    Mutant("M13", "Negates the row offsets at capture", "sglang#31367", patch=_indptr(_sentinel_at_capture)),
    Mutant(
        "M22",
        "Counts the tail twice in DRAFT_EXTEND",
        "sglang#26512",
        patch=prefix(lambda b, x: x.prefix_lens + _t(x), Mode.DRAFT_EXTEND),
    ),
    Mutant(
        "M28",
        "Writes metadata only for live requests, though the launch is padded",
        "sglang#29262",
        patch=on_batch(live_only, "write_metadata"),
    ),
    Mutant(
        "M09",
        "Uses lengths of zero at capture",
        "sglang#26521",
        patch=prefix(lambda b, x: torch.zeros_like(x.prefix_lens) if is_recording() else x.prefix_lens),
    ),
    Mutant("V01", "Starts the tail one token too late", "sglang#15469", patch=prefix(lambda b, x: x.prefix_lens + 1)),
    Mutant(
        "V02",
        "Starts the tail one token too early, except for empty prefixes",
        "vllm#8145",
        patch=prefix(lambda b, x: (x.prefix_lens - 1).clamp(min=0)),
    ),
    Mutant(
        "V03",
        "Treats an empty prefix as one token",
        "sglang#1779",
        patch=prefix(lambda b, x: x.prefix_lens.clamp(min=1)),
    ),
    Mutant(
        "V04",
        "Leaves the tail out of the length in VERIFY",
        "sglang#26512",
        patch=prefix(lambda b, x: (x.prefix_lens - _t(x)).clamp(min=0), Mode.VERIFY),
    ),
    Mutant(
        "V05",
        "Ignores the prefix in EXTEND",
        "vllm#53658",
        patch=prefix(lambda b, x: torch.zeros_like(x.prefix_lens), Mode.EXTEND),
    ),
    Mutant(
        "V06",
        "Clamps lengths to the context limit",
        "TRT-LLM#16280",
        patch=prefix(lambda b, x: x.prefix_lens.clamp(max=b.geometry.limits.max_context_len)),
    ),
    Mutant(
        "V07",
        "Rounds lengths down to whole pages",
        "sglang#15469",
        patch=prefix(lambda b, x: x.prefix_lens // b.geometry.attention.page_size * b.geometry.attention.page_size),
    ),
    Mutant("V08", "Treats every draft step as step 0", "sglang#25077", patch=on_batch(_step_zero)),
    Mutant("V10", "Reverses the bits of each mask word", "TRT-LLM#13006", patch=tail(_reversed)),
    Mutant("V11", "Shifts the mask bits by one slot", "TRT-LLM#13006", patch=tail(_shifted)),
    Mutant(
        "V12",
        "Sets the mask bits after the tail",
        "flashinfer#1028",
        patch=tail(_high_bits),
        layouts=("csr",),
        absent="it reads the batch's mask in place, and never the bits at or above T",
    ),
    Mutant("V13", "Gives all rows the mask of the first row", "sglang#32920", patch=tail(_same_rows)),
    Mutant("V14", "Reads only the first mask word", "TRT-LLM#13081", patch=tail(_one_word)),
    Mutant(
        "V15",
        "Ignores the tree mask and treats the tail as causal",
        "sglang#32920",
        patch=on_batch(_causal, "write_metadata", "attend"),
    ),
    Mutant("V16", "Measures the window in slots instead of positions", "tokenspeed#613", patch=tail(_chain_depth)),
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
    Mutant("V20", "Reads the page table only up to the context limit", "sglang#35985", patch=_table(_narrow)),
    Mutant("V21", "Stores padded rows on the first request's pages", "lmdeploy#4569", patch=_table(_padding_on_live)),
    Mutant(
        "V22",
        "Swaps the first two pages",
        "sglang#38187",
        patch=_table(
            lambda b, x: (
                torch.cat((x.page_table[:, 1:2], x.page_table[:, :1], x.page_table[:, 2:]), 1)
                if x.page_table.shape[1] > 1
                else x.page_table
            )
        ),
    ),
    Mutant(
        "V23",
        "Truncates page ids to 16 bits",
        "sglang#27840",
        patch=_table(lambda b, x: x.page_table.to(torch.int16).to(torch.int32)),
    ),
    Mutant(
        "V24",
        "Reads the first request's pages for every request",
        "sglang#26019",
        patch=_table(lambda b, x: x.page_table[:1].expand_as(x.page_table)),
    ),
    Mutant(
        "V64",
        "Applies no causal mask in DRAFT_EXTEND",
        "flashinfer#1028",
        patch=on_batch(_all_tail, "attend"),
        layouts=("reference",),
        absent="its kernel is causal in that mode and reads no mask",
    ),
    Mutant("V65", "Counts depths from one", "tokenspeed#613", patch=tail(_deeper)),
)
