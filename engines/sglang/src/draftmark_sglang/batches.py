"""Conversion of SGLang's batch of a forward to draftmark's `ForwardBatch`.

A graph must not read SGLang's `req_to_token` during replay. `uniform_batch` therefore copies what the graph needs into
static buffers before each replay. `write_batch` computes the rest inside the graph, where a launch costs no host time.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths, Unknown, ragged

from .attention import LayerAttention
from .page_table import write_page_table
from .phases import counted_rows
from .trees import TreeMasks


def uniform_batch(
    attention: LayerAttention,
    forward: Any,
    mode: Mode,
    req_to_token: torch.Tensor,
    *,
    masks: TreeMasks | None = None,
    in_capture: bool,
) -> ForwardBatch:
    """Fill the static buffers for a DECODE, VERIFY or DRAFT_EXTEND batch, before a CUDA graph is captured or replayed.

    A padding request has `seq_lens` 1 and row 0 of `req_to_token`, which is zero. So its page table has only the
    null page, and the kernels need no special case for it.

    Args:
        forward: SGLang's `ForwardBatch`, or its view of a batch that a graph replays.
        masks: copies of the tree masks; None when `forward.spec_info.custom_mask` holds no tree.
        in_capture: True before a capture, when lengths have no meaning.
    """
    counted = counted_rows(mode, attention.geometry.draft.num_draft_tokens)
    host = host_lengths(forward, attention.geometry, counted, in_capture)
    batch = attention.uniform(mode, 0, forward.batch_size, host, tree=masks is not None)
    attention.prefixes.copy(batch, forward, counted, req_to_token)
    if masks is not None:
        masks.copy(batch, forward)
    return batch


def write_batch(attention: LayerAttention, batch: ForwardBatch, masks: TreeMasks | None = None) -> None:
    """Compute lengths, page table, draft-tree visibility and positions from the copies that `uniform_batch` made.

    A CUDA graph captures this call.
    """
    attention.prefixes.write(batch, counted_rows(batch.mode, attention.geometry.draft.num_draft_tokens))
    parents = None if masks is None else masks.parents(batch.padded_reqs)
    attention.tree_ops.write_tail(batch, parents)


def extend_batch(geometry: Geometry, forward: Any, req_to_token: torch.Tensor) -> ForwardBatch:
    """Return an EXTEND batch in new tensors: prefill, chunked prefill and mixed decodes, each with its own rows."""
    q_lens = tuple(int(one) for one in forward.extend_seq_lens_cpu)
    prefix = forward.extend_prefix_lens[: len(q_lens)].to(torch.int32)
    table = torch.empty(len(q_lens), geometry.max_pages_per_req, dtype=torch.int32, device=prefix.device)
    write_page_table(table, req_to_token, forward.req_pool_indices[: len(q_lens)], geometry.attention.page_size)
    known = forward.extend_prefix_lens_cpu
    host: HostLengths = Unknown(len(q_lens), geometry.max_prefix_len)
    if known is not None:
        host = Exact(tuple(int(one) for one in known))
    return ragged(geometry, prefix, table, q_lens, host)


def host_lengths(forward: Any, geometry: Geometry, counted: int, in_capture: bool) -> HostLengths:
    """Return the committed lengths as the host has them: `Exact`, or `Unknown` with the geometry's largest as bound.

    SGLang copies lengths to the host only when a backend sets `needs_cpu_seq_lens`.

    Args:
        counted: number of this forward's rows that `seq_lens` already includes.
        in_capture: True before a capture, when lengths have no meaning.
    """
    known = getattr(forward, "seq_lens_cpu", None)
    if in_capture or known is None:
        return Unknown(forward.batch_size, geometry.max_prefix_len)
    return Exact(tuple(max(0, int(one) - counted) for one in known[: forward.batch_size].tolist()))
