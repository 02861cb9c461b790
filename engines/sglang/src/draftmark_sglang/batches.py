"""A `ForwardBatch` from what SGLang hands a backend before each forward.

Everything here runs outside a captured region: SGLang calls it before a capture and before each replay, and says
that its `req_to_token` is no longer read when the replay starts, so what a graph needs of it is copied into static
buffers here.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths, TreeOps, Unknown, ragged

from .attention import LayerAttention
from .page_table import write_page_table
from .phases import counted_rows
from .trees import parents_of_mask


def uniform_batch(
    attention: LayerAttention, forward: Any, mode: Mode, req_to_token: torch.Tensor, *, tree: bool, in_capture: bool
) -> ForwardBatch:
    """Fill the static buffers for a DECODE, VERIFY or DRAFT_EXTEND batch.

    A padded request, whose `seq_lens` is 1 and whose row is 0, is served as any other: a row with null pages.

    Args:
        forward: SGLang's `ForwardBatch`, or its view of one that a graph replays.
        tree: whether `forward.spec_info.custom_mask` says who sees whom.
        in_capture: whether a graph is about to be captured, when lengths mean nothing.
    """
    geometry, requests = attention.geometry, forward.batch_size
    counted = counted_rows(mode, geometry.draft.num_draft_tokens)
    fill_prefix(attention, forward, counted, req_to_token)
    host = host_lengths(forward, geometry, counted, in_capture)
    batch = attention.buffers.uniform(mode, 0, requests, requests, host, tree=tree)
    write_tail(attention.tree_ops, batch, forward, tree)
    return batch


def fill_prefix(attention: LayerAttention, forward: Any, counted: int, req_to_token: torch.Tensor) -> None:
    """Committed lengths and page tables into the static buffers."""
    requests, buffers = forward.batch_size, attention.buffers
    prefix = torch.sub(forward.seq_lens[:requests], counted, out=buffers.prefix_lens[:requests])
    if counted > 1:
        prefix.clamp_(min=0)  # of a padded request one row is counted, and all of its rows are subtracted
    rows = forward.req_pool_indices[:requests]
    write_page_table(buffers.page_table[:requests], req_to_token, rows, attention.geometry.attention.page_size)


def write_tail(tree_ops: TreeOps, batch: ForwardBatch, forward: Any, tree: bool) -> None:
    """Who sees whom, and positions. In a replay `spec_info` is not padded: padded requests get roots alone."""
    if not tree:
        tree_ops.write_tail(batch)
        return
    requests, nodes = batch.padded_reqs, batch.q_lens[0]
    live = requests - (getattr(forward, "num_padding", 0) or 0)
    mask = forward.spec_info.custom_mask[: live * nodes * nodes].view(live, nodes, nodes).bool()
    parents = torch.full((requests, nodes), -1, dtype=torch.int64, device=batch.device)
    parents[:live] = parents_of_mask(mask)
    tree_ops.write_tail(batch, parents)


def extend_batch(geometry: Geometry, forward: Any, req_to_token: torch.Tensor) -> ForwardBatch:
    """An EXTEND batch, in fresh tensors: prefill, chunks of it, and decodes mixed in, each with its own rows."""
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
    """What SGLang's host knows: exact lengths, where a backend asks for them, or nothing; never a bound in between."""
    known = getattr(forward, "seq_lens_cpu", None)
    if in_capture or known is None:
        return Unknown(forward.batch_size, geometry.max_prefix_len)
    return Exact(tuple(max(0, int(one) - counted) for one in known[: forward.batch_size].tolist()))
