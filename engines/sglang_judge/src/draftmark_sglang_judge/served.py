"""Check that a request which fills the context fits its row of `req_to_token`, in SGLang's running scheduler."""

from __future__ import annotations

from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from .guards import GuardWords
from .in_process import run_until_done, submit
from .setups import CONTEXT, Setup

LEFT = 8
"""Tokens from the prompt's end to the context's end. SGLang rejects a prompt that leaves fewer than seven."""


def serve_to_the_end(scheduler: Any, setup: Setup) -> None:
    """Serve one prompt until SGLang itself ends the request.

    On a CPU, SGLang writes `req_to_token` with a compiled function, on CUDA with a Triton kernel. If a write would
    pass the row's end, this check runs the Triton kernel on a guarded copy and counts the misplaced entries.

    Raises:
        ContractViolation: the slots that SGLang reserves for a round pass the end of the request's row.
    """
    import sglang.srt.mem_cache.allocation as allocation

    original = allocation.assign_req_to_token_pool_func

    def watched(rows: Any, table: Any, start: Any, end: Any, slots: Any, count: int) -> None:
        if int(end.max()) > table.shape[1]:
            _report(allocation, (rows, table, start, end, slots, count), setup)
        original(rows, table, start, end, slots, count)

    allocation.assign_req_to_token_pool_func = watched
    try:
        prompt = (list(range(3, 29)) * 4)[: CONTEXT - LEFT]
        run_until_done(scheduler, submit(scheduler, [prompt], CONTEXT))
    finally:
        allocation.assign_req_to_token_pool_func = original


def _report(allocation: Any, arguments: tuple[Any, ...], setup: Setup) -> None:
    rows, table, start, end, slots, count = arguments
    words = GuardWords(table.device.type)
    with words:
        copy = torch.zeros(table.shape, dtype=table.dtype, device=table.device)
    copy.fill_(-1)
    power = 1 << (count - 1).bit_length()
    allocation.assign_req_to_token_pool[(count,)](rows, copy, start, end, slots, table.shape[1], power)
    mine = torch.zeros(len(copy), dtype=torch.bool, device=table.device)
    mine[rows] = True
    others = int((copy[~mine] != -1).sum()) + words.tensors[0].written_past_end()
    length, width, last = int(start.min()), table.shape[1], int(end.max())
    raise ContractViolation(
        f"SGLang reserves {last - width} more slots than a row of req_to_token holds, and its kernel writes them past "
        "the row's end, where the next request's row begins",
        batch=f"one request of {length} tokens, context {CONTEXT}, topk {setup.topk}, {setup.num_steps} steps, "
        f"{setup.num_draft_tokens} drafts, page size {setup.page_size}",
        got=f"a row of {width}, {others} entries written outside of it",
        expected=f"a row of at least {last}",
        formula="context + reserve a round, where get_req_to_token_extra_context_len has 4 + num_draft_tokens",
        bug="sglang#33581",
        remedy="SGLang adds the reserve in that function only for page sizes above 1",
    )
