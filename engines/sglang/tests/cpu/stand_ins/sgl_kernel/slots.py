"""Stand-in for tests on a CPU: SGLang's kernels that assign KV slots to positions and move KV between slots."""

from __future__ import annotations

import ctypes

import torch


def _spans(start: torch.Tensor, end: torch.Tensor) -> list[tuple[int, int]]:
    return list(zip(start.tolist(), end.tolist(), strict=True))


def assign_req_to_token_pool_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Write the next slots of out_cache_loc to req_to_token[rows[i], start[i]:end[i]] for each request i."""
    at = 0
    for row, (low, high) in zip(rows.tolist(), _spans(start, end), strict=True):
        assert high <= width, f"row {row} ends at {width}, but {high} is written"
        req_to_token[row, low:high] = out_cache_loc[at : at + high - low].to(req_to_token.dtype)
        at += high - low


def assign_extend_cache_locs_cpu(rows, req_to_token, start, end, out_cache_loc, width) -> None:
    """Write req_to_token[rows[i], start[i]:end[i]] of each request i to the next slots of out_cache_loc."""
    at = 0
    for row, (low, high) in zip(rows.tolist(), _spans(start, end), strict=True):
        assert high <= width, f"row {row} ends at {width}, but {high} is read"
        out_cache_loc[at : at + high - low] = req_to_token[row, low:high].to(out_cache_loc.dtype)
        at += high - low


def assign_draft_cache_locs_contiguous_cpu(rows, req_to_token, seq_lens, out_cache_loc, width, topk, num_steps) -> None:
    """Write the slots of the topk · num_steps positions after each request's length to out_cache_loc."""
    end = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(rows, req_to_token, seq_lens, end, out_cache_loc, width)


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, stride) -> None:
    """Write the last accepted token of each request to bonus_tokens."""
    last = torch.arange(len(accept_lens)) * stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc) -> None:
    """Write the slots of accepted nodes contiguously. An accept_index of -1 marks an unused entry."""
    kept = accept_index.flatten()
    kept = kept[kept >= 0].long()
    accept_out_cache_loc[: len(kept)] = out_cache_loc[kept]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, target, source) -> None:
    """Copy rows `source` to rows `target` in every buffer; all rows are read before any is written."""
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(pointer + row * stride, stride) for row in source.tolist()]
        for row, content in zip(target.tolist(), rows, strict=True):
            ctypes.memmove(pointer + row * stride, content, stride)
