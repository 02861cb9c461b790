"""Checks of the TRT-LLM backend's CUDA graphs: a capture fills the lengths, and page tables have enough columns."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from .bare import bare, member, translator

PAGE, CONTEXT, DRAFTS, REQUESTS = 16, 64, 6, 2
AT_THE_END = CONTEXT - 4
MODULE = "srt.layers.attention.trtllm_mha_backend"


def check_capture() -> None:
    """Check that the capture of a draft step fills the lengths that its kernel reads.

    Raises:
        ContractViolation: the lengths differ from the batch's lengths.
    """
    made = _backend()
    lengths = torch.tensor([5, 9], dtype=torch.int64)
    _prepare(made, "DECODE", SimpleNamespace(), lengths, capture=True)
    got = made.forward_metadata.cache_seqlens_int32.tolist()
    want = (lengths + 1).tolist()
    if got != want:
        raise ContractViolation(
            "the captured draft step attends over no keys: cache_seqlens is not filled at capture",
            batch=f"capture of draft step 0: lengths {lengths.tolist()}, context {CONTEXT}, page size {PAGE}",
            got=got,
            expected=f"{want}, each length and the step's own token",
            bug="sglang#26521",
        )


def check_width() -> None:
    """Check that the replay of a verify at the context's end has a page table column for each page of each request.

    Raises:
        ContractViolation: the lengths need more pages than the table has columns.
    """
    made = _backend()
    lengths = torch.full((REQUESTS,), AT_THE_END, dtype=torch.int64)
    spec_info = SimpleNamespace(ragged_verify_layout=None, num_tokens_per_req=DRAFTS)
    _prepare(made, "TARGET_VERIFY", spec_info, lengths, capture=True)
    metadata = made.forward_metadata
    _prepare(made, "TARGET_VERIFY", spec_info, lengths, capture=False)
    reads, columns = int(metadata.cache_seqlens_int32.max()), metadata.page_table.shape[1]
    need = -(-reads // PAGE)
    if need > columns:
        raise ContractViolation(
            f"the page table has {need - columns} columns too few for its cache_seqlens",
            batch=f"verification: lengths {lengths.tolist()}, {DRAFTS} drafts, context {CONTEXT}, page size {PAGE}",
            got=f"page_table {list(metadata.page_table.shape)}",
            expected=f"{need} columns: cache_seqlens is {reads}",
            formula="ceil((length + num_draft_tokens) / page_size)",
            bug="sglang#35985",
        )


def _backend() -> Any:
    table = torch.arange(8 * (CONTEXT + 32), dtype=torch.int32).view(8, -1)
    made = bare(
        member(MODULE, "TRTLLMHAAttnBackend"),
        device="cpu",
        max_context_len=CONTEXT,
        # SGLang's constructor sets this value; releases without the attribute ignore it.
        max_num_pages=-(-CONTEXT // PAGE),
        page_size=PAGE,
        req_to_token=table,
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        speculative_num_draft_tokens=DRAFTS,
        speculative_step_id=0,
        topk=1,
        use_sliding_window_kv_pool=False,
        _swa_kv_pool=None,
        _swa_full_to_swa_mapping=None,
        expand_encoder_only_verify=False,
        kv_index_translator=translator(table),
        decode_cuda_graph_metadata={},
        target_verify_metadata={},
        forward_metadata=None,
    )
    made.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    return made


def _prepare(made: Any, mode: str, spec_info: Any, lengths: torch.Tensor, capture: bool) -> None:
    """Call the release's own preparation of a capture or a replay.

    SGLang up to 0.5.12 has a function for each of them, later releases have one function for both.
    """
    forward_mode = getattr(member("srt.model_executor.forward_batch_info", "ForwardMode"), mode)
    rows = torch.arange(1, REQUESTS + 1)
    tokens = REQUESTS * (1 if mode == "DECODE" else DRAFTS)
    if hasattr(type(made), "init_forward_metadata_capture_cuda_graph"):
        given = (rows, lengths)
        if capture:
            made.init_forward_metadata_capture_cuda_graph(REQUESTS, tokens, *given, None, forward_mode, spec_info)
        else:
            made.init_forward_metadata_replay_cuda_graph(
                REQUESTS, *given, int(lengths.sum()), None, forward_mode, spec_info, lengths
            )
        return
    batch = SimpleNamespace(
        batch_size=REQUESTS,
        req_pool_indices=rows,
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        encoder_lens=None,
        forward_mode=forward_mode,
        actual_forward_mode=forward_mode,
        spec_info=spec_info,
        positions=torch.zeros(tokens, dtype=torch.int64),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        out_cache_loc=torch.zeros(tokens, dtype=torch.int64),
        kv_loc_plan=None,
    )
    made.init_forward_metadata_out_graph(batch, in_capture=capture)
    made.init_forward_metadata_in_graph(batch)
