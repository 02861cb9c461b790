"""A `ForwardBatch` from what SGLang hands a backend before each forward.

SGLang says that its `req_to_token` is no longer read when a replay starts, so what a graph needs of SGLang's is copied
into static buffers before (`uniform_batch`). What follows from those buffers alone is worked out in the graph
(`write_batch`), where a launch costs the host nothing.
"""

from __future__ import annotations

from typing import Any

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import Exact, ForwardBatch, HostLengths, Unknown, ragged

from .attention import LayerAttention
from .page_table import write_page_table
from .phases import counted_rows, live_requests
from .trees import parents_of_mask


def uniform_batch(
    attention: LayerAttention,
    forward: Any,
    mode: Mode,
    req_to_token: torch.Tensor,
    *,
    seen: torch.Tensor | None = None,
    in_capture: bool,
) -> ForwardBatch:
    """Fill the static buffers for a DECODE, VERIFY or DRAFT_EXTEND batch, outside a captured region.

    A padded request, whose `seq_lens` is 1 and whose row is 0, is served as any other: a row with null pages.

    Args:
        forward: SGLang's `ForwardBatch`, or its view of one that a graph replays.
        seen: where a tree's masks are kept; None where `forward.spec_info.custom_mask` does not say who sees whom.
        in_capture: whether a graph is about to be captured, when lengths mean nothing.
    """
    counted = counted_rows(mode, attention.geometry.draft.num_draft_tokens)
    host = host_lengths(forward, attention.geometry, counted, in_capture)
    batch = attention.uniform(mode, 0, forward.batch_size, host, tree=seen is not None)
    attention.prefixes.copy(batch, forward, counted, req_to_token)
    if seen is not None:
        copy_masks(seen, batch, forward)
    return batch


def copy_masks(seen: torch.Tensor, batch: ForwardBatch, forward: Any) -> None:
    """Keep the live requests' masks. `spec_info` is not padded: padded requests get roots alone.

    Args:
        seen: bool ``[max requests · D · D]``.
    """
    cells = batch.q_lens[0] ** 2
    live = live_requests(forward, batch.padded_reqs)
    seen[: live * cells].copy_(forward.spec_info.custom_mask[: live * cells])
    if live < batch.padded_reqs:
        seen[live * cells : batch.padded_reqs * cells].zero_()


def write_batch(attention: LayerAttention, batch: ForwardBatch, seen: torch.Tensor | None = None) -> None:
    """Finish what `uniform_batch` has copied: lengths, pages, who sees whom, positions. Captured."""
    attention.prefixes.write(batch, counted_rows(batch.mode, attention.geometry.draft.num_draft_tokens))
    if seen is None:
        attention.tree_ops.write_tail(batch)
        return
    requests, nodes = batch.padded_reqs, batch.q_lens[0]
    masks = seen[: requests * nodes * nodes].view(requests, nodes, nodes)
    attention.tree_ops.write_tail(batch, parents_of_mask(masks))


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
