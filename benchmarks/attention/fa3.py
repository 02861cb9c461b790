"""FlashAttention 3 (vLLM's build), run in two ways: without a tree mask, and in two calls for an exact tree.

With an e4m3 cache it needs e4m3 rows and rounds its weights to e4m3. Rows are rounded before the timed call.
`DRAFTMARK_FA3_LIBRARY` is the path of vLLM's `_vllm_fa3_C.abi3.so`.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .cases import Inputs
from .models import Model
from .peers import Peer, as_tokens
from .stubs import Absent

FA3_LIBRARY = "DRAFTMARK_FA3_LIBRARY"
"""Environment variable: path of vLLM's `_vllm_fa3_C.abi3.so`."""


def _load() -> None:
    path = os.environ.get(FA3_LIBRARY, "")
    if not os.path.exists(path):
        raise Absent(f"{FA3_LIBRARY} names no file")
    torch.ops.load_library(path)


def _forward(
    model: Model,
    q: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    q_indptr: torch.Tensor,
    q_len: int,
    lens: torch.Tensor,
    longest: int,
    table: torch.Tensor,
    causal: bool,
    sinks: torch.Tensor | None = None,
) -> Callable[[], torch.Tensor]:
    """Return a call of FA3's forward with a precomputed schedule; it returns the log-sum-exp ``[heads, rows]``."""
    page = pair[0].shape[1]
    window = (model.window_left, 0 if model.window else -1)
    metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        lens.numel(), q_len, longest, model.heads, model.kv_heads, model.dim, model.dim, q.dtype, lens, q_indptr,
        None, None, None, None, page, 0, causal, *window, model.cap > 0, 0, None, 0,
    )  # fmt: skip

    def call() -> torch.Tensor:
        return torch.ops._vllm_fa3_C.fwd(
            q, *pair, None, None, None, out, q_indptr, None, None, None, lens, q_len, longest, table, None, None, None,
            None, None, None, None, None, model.scale, causal, *window, model.cap, True, metadata, 0, None, 0, sinks, 1,
            0, None,
        )[1]  # fmt: skip

    return call


def fa3(inputs: Inputs) -> Peer:
    """Run FlashAttention 3 once, without a tree mask: a tree runs as a chain, a draft step only on its prefix."""
    case, model = inputs.case, inputs.case.model
    _load()
    draft = case.tree and case.q_len != case.tail_len
    if draft and model.window:
        raise Absent("its window counts rows, and a draft step's are at one depth")
    sinks = None if inputs.sinks is None else inputs.sinks.to(inputs.q.dtype)
    causal = not draft and case.q_len > 1
    lens = inputs.prefix_lens if draft else inputs.prefix_lens + inputs.tails
    longest = max(case.lens) + (0 if draft else case.tail_len)
    q, outs = _rows(inputs), [torch.empty_like(inputs.q) for _ in inputs.caches]
    calls = [
        _forward(model, q, pair, out, inputs.q_indptr, case.q_len, lens, longest, inputs.page_table, causal, sinks)
        for pair, out in zip(inputs.caches, outs, strict=True)
    ]
    tail = "none" if draft else "causal" if case.tree else "exact"
    return Peer(list(calls), outs, tail, rounds=model.is_narrow)


def composed(inputs: Inputs) -> Peer:
    """Run FA3 twice: on the prefix without a mask, and on each row's tree ancestors at page size 1. Merge both."""
    case, model = inputs.case, inputs.case.model
    if not case.tree or inputs.seen is None:
        raise Absent("no tree in this case")
    if model.window or model.sinks:
        raise Absent("its window counts rows, where a tree's counts depths; of two parts each would count the sinks")
    _load()
    q, rows = _rows(inputs), inputs.q.shape[0]
    ancestors, counts = _ancestors(inputs)
    ones = torch.arange(rows + 1, dtype=torch.int32, device="cuda")
    outs = [torch.empty_like(inputs.q) for _ in inputs.caches]
    other = torch.empty_like(inputs.q)
    calls = []
    for pair, out in zip(inputs.caches, outs, strict=True):
        prefix = _forward(
            model, q, pair, out, inputs.q_indptr, case.q_len, inputs.prefix_lens, max(case.lens), inputs.page_table,
            False,
        )  # fmt: skip
        tail = _forward(
            model, q, as_tokens(pair), other, ones, 1, counts, case.tail_len, ancestors, False
        )  # fmt: skip
        calls.append(_merged(prefix, tail, out, other))
    note = "prefix, ancestors at page size 1, merge"
    return Peer(calls, outs, note=note, rounds=model.is_narrow)


def _rows(inputs: Inputs) -> torch.Tensor:
    """Return the queries in the dtype of KV."""
    return inputs.q.to(inputs.caches[0][0].dtype)


def _ancestors(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache slots of draft tokens that each row sees, int32 ``[rows, tail slots]``, and their number."""
    case, page = inputs.case, inputs.case.model.page
    at = inputs.prefix_lens[:, None].long() + torch.arange(case.tail_len, device="cuda")
    slots = inputs.page_table.long().gather(1, at // page) * page + at % page
    seen = inputs.seen.view(-1, case.tail_len)
    order = seen.int().argsort(dim=1, descending=True, stable=True)
    of_row = slots.repeat_interleave(case.q_len, 0).gather(1, order)
    return of_row.int(), seen.sum(1, dtype=torch.int32)


def _merged(
    prefix: Callable[[], torch.Tensor], tail: Callable[[], torch.Tensor], out: torch.Tensor, other: torch.Tensor
) -> Callable[[], object]:
    def call() -> None:
        near, far = prefix(), tail()
        merge_states[out.shape[:2]](
            out, other, near, far, out.shape[0], DIM=out.shape[2], BLOCK=triton.next_power_of_2(out.shape[2])
        )

    return call


@triton.jit
def merge_states(out, other, near, far, rows, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Merge `other` into `out` with weights from the log-sum-exps `near` and `far`; one program per row and head."""
    row, head, heads = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    a, b = tl.load(near + head * rows + row), tl.load(far + head * rows + row)
    top = tl.maximum(a, b)
    a, b = tl.exp(a - top), tl.exp(b - top)
    col = tl.arange(0, BLOCK)
    at = (row * heads + head) * DIM + col
    x = tl.load(out + at, mask=col < DIM).to(tl.float32) * a + tl.load(other + at, mask=col < DIM).to(tl.float32) * b
    tl.store(out + at, (x / (a + b)).to(out.dtype.element_ty), mask=col < DIM)
