"""A request in SGLang's own running scheduler, up to the context's end: does its row of `req_to_token` hold it?"""

from __future__ import annotations

import array
from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from .guards import GuardWords
from .setups import CONTEXT, Setup

LEFT = 8
"""Tokens between the prompt's end and the context's; SGLang takes no prompt that leaves fewer than seven."""


def serve_to_the_end(scheduler: Any, setup: Setup) -> None:
    """Serve one prompt until SGLang itself ends it.

    On a CPU a compiled function of SGLang's writes `req_to_token`; here its Triton kernel does, as on CUDA, on a copy
    with guard words, whenever a write ends behind the row.

    Raises:
        ContractViolation: what SGLang reserves for a round ends behind the request's row.
    """
    import sglang.srt.mem_cache.allocation as allocation

    original = allocation.assign_req_to_token_pool_func

    def watched(rows: Any, table: Any, start: Any, end: Any, slots: Any, count: int) -> None:
        if int(end.max()) > table.shape[1]:
            _report(allocation, (rows, table, start, end, slots, count), setup)
        original(rows, table, start, end, slots, count)

    allocation.assign_req_to_token_pool_func = watched
    try:
        _run(scheduler, _submit(scheduler, list(range(3, 29)) * 4))
    finally:
        allocation.assign_req_to_token_pool_func = original


def _report(allocation: Any, given: tuple[Any, ...], setup: Setup) -> None:
    rows, table, start, end, slots, count = given
    words = GuardWords()
    with words:
        copy = torch.zeros(table.shape, dtype=table.dtype)
    copy.fill_(-1)
    power = 1 << (count - 1).bit_length()
    allocation.assign_req_to_token_pool[(count,)](rows, copy, start, end, slots, table.shape[1], power)
    mine = torch.zeros(len(copy), dtype=torch.bool)
    mine[rows] = True
    others = int((copy[~mine] != -1).sum()) + words.tensors[0].written_behind()
    length, width, last = int(start.min()), table.shape[1], int(end.max())
    raise ContractViolation(
        f"SGLang reserves {last - width} slots more than a row of req_to_token holds, and its kernel writes them "
        "behind the row, where the next request's row begins",
        batch=f"one request of {length} tokens, context {CONTEXT}, topk {setup.topk}, {setup.num_steps} steps, "
        f"{setup.num_draft_tokens} drafts, page size {setup.page_size}",
        got=f"a row of {width}, {others} entries written outside of it",
        expected=f"a row of at least {last}",
        formula="context + reserve a round, where get_req_to_token_extra_context_len has 4 + num_draft_tokens",
        bug="sglang#33581",
        remedy="the reserve is in that function for page sizes above 1 alone",
    )


def _submit(scheduler: Any, tokens: list[int]) -> Any:
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(max_new_tokens=CONTEXT, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    request = TokenizedGenerateReqInput(
        rid="to-the-end",
        input_text=None,
        input_ids=array.array("q", tokens[: CONTEXT - LEFT]),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=sampling,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        token_ids_logprob=None,
        stream=False,
    )
    scheduler.process_input_requests([request])
    return scheduler.waiting_queue[-1]


def _run(scheduler: Any, request: Any) -> None:
    idle = 0

    def receive(**_: Any) -> list[Any]:
        nonlocal idle
        scheduler.gracefully_exit = not scheduler.last_batch and request.finished()
        idle = 0 if scheduler.last_batch else idle + 1
        if idle > 50:
            raise RuntimeError("the request waits, and nothing runs")
        return []

    scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
    scheduler.gracefully_exit = False
    scheduler.run_event_loop()
