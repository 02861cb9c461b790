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
    """Fill the static buffers for a DECODE, VERIFY or DRAFT_EXTEND batch, outside a captured region.

    A padded request, whose `seq_lens` is 1 and whose row is 0, is served as any other: a row with null pages.

    Args:
        forward: SGLang's `ForwardBatch`, or its view of one that a graph replays.
        masks: where trees' masks are kept; None where `forward.spec_info.custom_mask` does not say who sees whom.
        in_capture: whether a graph is about to be captured, when lengths mean nothing.
    """
    counted = counted_rows(mode, attention.geometry.draft.num_draft_tokens)
    host = host_lengths(forward, attention.geometry, counted, in_capture)
    batch = attention.uniform(mode, 0, forward.batch_size, host, tree=masks is not None)
    attention.prefixes.copy(batch, forward, counted, req_to_token)
    if masks is not None:
        masks.copy(batch, forward)
    return batch


def write_batch(attention: LayerAttention, batch: ForwardBatch, masks: TreeMasks | None = None) -> None:
    """Finish what `uniform_batch` has copied: lengths, pages, who sees whom, positions. Captured."""
    attention.prefixes.write(batch, counted_rows(batch.mode, attention.geometry.draft.num_draft_tokens))
    parents = None if masks is None else masks.parents(batch.padded_reqs)
    attention.tree_ops.write_tail(batch, parents)


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
