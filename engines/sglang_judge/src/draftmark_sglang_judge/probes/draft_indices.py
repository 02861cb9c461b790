"""Check of `kv_indices` in CUDA graph buffers of multi-step draft backends: buffer sizes, and the KV slots in them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from ..guards import GuardWords
from .bare import bare, member, translator
from .lengths import CONTEXT, LENGTHS, STEPS
from .room import check_room

KINDS = {
    "flashinfer": ("srt.layers.attention.flashinfer_backend", "FlashInferMultiStepDraftBackend"),
    "flashinfer_mla": ("srt.layers.attention.flashinfer_mla_backend", "FlashInferMLAMultiStepDraftBackend"),
    "triton": ("srt.layers.attention.triton_backend", "TritonMultiStepDraftBackend"),
}
EXTRA = 64
"""Columns of `req_to_token` past the context length."""


def check(
    backend: str, topk: int, lengths: tuple[int, ...] = LENGTHS, steps: int = STEPS, bug: str = "sglang#27338"
) -> None:
    """Fill the buffers of `init_cuda_graph_state`, and compare each row of `kv_indices` with `req_to_token`.

    Raises:
        ContractViolation: a row is too short for its last step, a write missed the buffer, or a slot is wrong.
    """
    table = (torch.arange(8 * (CONTEXT + EXTRA)).view(8, -1) * 7 % 4093).to(torch.int32)
    made, words = _backend(backend, topk, len(lengths), steps, table), GuardWords()
    with words:
        made.init_cuda_graph_state(len(lengths), len(lengths) * topk)
    buffer = made.cuda_graph_kv_indices
    _check_width(buffer, topk, lengths, steps, bug)
    _fill(made, topk, lengths, table)
    words.check(_describe_batch(topk, lengths, steps), bug)
    _check_slots(made, topk, lengths, steps, table, bug)


def _backend(name: str, topk: int, requests: int, steps: int, table: torch.Tensor) -> Any:
    kind = member(*KINDS[name])
    kernel = member("srt.speculative.spec_utils", "generate_draft_decode_kv_indices")
    step = SimpleNamespace(
        init_cuda_graph_state=lambda *given, **named: None, max_kv_splits=8, use_sliding_window_kv_pool=False
    )
    return bare(
        kind,
        topk=topk,
        speculative_num_steps=steps,
        generate_draft_decode_kv_indices=kernel,
        page_size=1,
        kv_indptr=torch.zeros(steps, requests * topk + 1, dtype=torch.int32),
        kv_last_page_len=torch.ones(requests * topk, dtype=torch.int32),
        attn_backends=[step] * (steps - 1),
        max_context_len=CONTEXT,
        pool_len=table.shape[1],
        device="cpu",
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        kv_index_translator=translator(table),
        draft_window_size=0,
        draft_sink_size=0,
        window_rail=False,
        sliding_window_size=None,
        cuda_graph_window_kv_indices=None,
    )


def _check_width(buffer: torch.Tensor, topk: int, lengths: tuple[int, ...], steps: int, bug: str) -> None:
    width, need = buffer.shape[1], topk * sum(lengths) + len(lengths) * topk * steps
    check_room(
        "a row of the draft graph's kv_indices",
        "entries",
        width,
        need,
        batch=_describe_batch(topk, lengths, steps),
        formula="topk * sum of lengths + requests * topk * num_steps",
        bug=bug,
        each=" a row",
    )


def _fill(made: Any, topk: int, lengths: tuple[int, ...], table: torch.Tensor) -> None:
    spec_info = SimpleNamespace(is_draft_input=lambda: True)
    batch = SimpleNamespace(
        batch_size=len(lengths),
        seq_lens=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(lengths, dtype=torch.int64),
        seq_lens_sum=sum(lengths),
        req_pool_indices=torch.arange(1, len(lengths) + 1),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        positions=torch.tensor(lengths, dtype=torch.int64).repeat_interleave(topk),
        spec_info=spec_info,
        kv_loc_plan=None,
    )
    made.common_template(batch, made.cuda_graph_kv_indices, lambda step, forward: None)


def _check_slots(made: Any, topk: int, lengths: tuple[int, ...], steps: int, table: torch.Tensor, bug: str) -> None:
    for step in range(steps - 1):
        bounds, row = made.kv_indptr[step].tolist(), made.cuda_graph_kv_indices[step].tolist()
        for n, length in enumerate(lengths):
            for branch in range(topk):
                own = table[n + 1, length + branch * steps : length + branch * steps + step + 1]
                want = [*table[n + 1, :length].tolist(), *own.tolist()]
                at = n * topk + branch
                got = row[bounds[at] : bounds[at + 1]]
                if got != want:
                    raise ContractViolation(
                        f"step {step}, request {n}, branch {branch}: kv_indices differ from the visible slots",
                        batch=_describe_batch(topk, lengths, steps),
                        got=f"{len(got)} slots, {got[:3]} … {got[-3:]}",
                        expected=f"{len(want)} slots, {want[:3]} … {want[-3:]}",
                        bug=bug,
                    )


def _describe_batch(topk: int, lengths: tuple[int, ...], steps: int) -> str:
    return f"draft round: lengths {list(lengths)}, context {CONTEXT}, topk {topk}, {steps} steps, page size 1"
