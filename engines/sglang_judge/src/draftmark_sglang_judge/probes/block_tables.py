"""Checks of CUDA graph buffer sizes: the Ascend backend's block table, and the Triton backend's verify mask."""

from __future__ import annotations

import torch

from draftmark_contract.check import Unjudged

from ..device_facts import full_masks
from .bare import bare, member
from .room import check_room

PAGE, CONTEXT, DRAFTS, REQUESTS, LENGTH = 16, 64, 6, 2, 60


def check_ascend() -> None:
    """Check that the graph's block table has columns for the draft tokens of a request as long as the context.

    Raises:
        ContractViolation: the table has too few columns.
    """
    made = bare(
        member("srt.hardware_backend.npu.attention.ascend_backend", "AscendAttnBackend"),
        device="cpu",
        max_context_len=CONTEXT,
        page_size=PAGE,
        speculative_num_draft_tokens=DRAFTS,
        is_hybrid_swa=False,
        use_sliding_window_kv_pool=False,
        dcp_size=1,
        is_dllm_model=False,
    )
    try:
        made.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    # From 0.5.18 on this call reads SGLang's published server arguments, which a probe does not have.
    except RuntimeError as error:
        raise Unjudged(f"its sizes depend on a running server's settings: {str(error).partition('.')[0]}") from error
    columns, need = made.graph_metadata["block_tables"].shape[1], -(-(LENGTH + DRAFTS) // PAGE)
    formula = "ceil((length + num_draft_tokens) / page_size)"
    check_room(
        "the graph's block table",
        "columns",
        columns,
        need,
        batch=_describe_batch(),
        formula=formula,
        bug="sglang#22778",
    )


def check_verify_mask() -> None:
    """Check that the verify mask of Triton's graph has (length + drafts) entries for each draft of each request.

    Raises:
        ContractViolation: the mask has fewer entries.
    """
    made = bare(
        member("srt.layers.attention.triton_backend", "TritonAttnBackend"),
        device="cpu",
        max_context_len=CONTEXT,
        num_draft_tokens=DRAFTS,
        skip_prefill=False,
        is_draft_runner=False,
        num_head=4,
        max_kv_splits=8,
        v_head_dim=16,
        swa_v_head_dim=None,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        dllm_attention=None,
        lean_total_programs=1,
        lean_block_m=16,
    )
    full_masks()
    made.init_cuda_graph_state(REQUESTS, REQUESTS * DRAFTS)
    old = vars(made).get("cuda_graph_custom_mask")
    mask: torch.Tensor = made.verify_mask.buffer if old is None else old
    have, need = mask.numel(), REQUESTS * DRAFTS * (LENGTH + DRAFTS)
    formula = "requests * num_draft_tokens * (length + num_draft_tokens)"
    check_room(
        "the graph's verify mask", "entries", have, need, batch=_describe_batch(), formula=formula, bug="sglang#29450"
    )


def _describe_batch() -> str:
    return f"verification: lengths {[LENGTH] * REQUESTS}, {DRAFTS} drafts, context {CONTEXT}, page size {PAGE}"
