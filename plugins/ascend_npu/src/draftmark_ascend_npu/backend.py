"""Backend that plans host lists, writes metadata, stores KV and runs torch_npu's fused attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from draftmark import Geometry, LengthsError
from draftmark.runtime import Arena, ForwardBatch, KVCache, sinks_of

from . import sizing
from .lengths import HostLists, Plans
from .metadata import Metadata, is_tree
from .recovery import Point, Recovery

if TYPE_CHECKING:
    from .graph import Pick
    from .ops import PagedAttention


class AscendBackend:
    """Runs attention on an Ascend NPU, with one code path for eager mode, capture and replay.

    A causal tail is one fused call over the pages. A tree is two calls: one over the pages of the prefix without a
    mask, and one over the gathered tail under a small dense mask. Their log-sum-exps give the weights of the merge.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        a = geometry.attention
        self.geometry = geometry
        self.arena = arena
        self._scale = a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5
        self._metadata = Metadata(geometry, arena)
        self._plans = Plans()
        self._no_lse = torch.empty(1, dtype=torch.float32, device=self._metadata.triangle.device)
        # Without overlap the host has exact lengths, so nothing is copied back and graphs record no event for a copy.
        self._recovery = Recovery(arena[sizing.HOST_LENS], self._plans) if geometry.limits.host_lags else None

    def plan(self, batch: ForwardBatch) -> None:
        """Store the batch's host lists; eager calls and the updates of a replay read them."""
        self._plans.set(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Write KV slots and block tables. For draft trees, also write the slots and mask of the trees' own rows."""
        self._metadata.write(batch)
        if self._recovery is not None and batch.device.type == "npu":
            self._request_lengths(batch, self._recovery)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Store K and V of the batch's rows at their slots."""
        from . import ops

        ops.scatter_kv(k, v, cache.k, cache.v, self._metadata.slots32(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention of all rows: by one call, or for draft trees by two calls and a merge."""
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which the operator does not serve
        q = q.contiguous()
        if is_tree(batch):
            self._attend_tree(q, cache, batch, out)
        else:
            self._attend_pages(q, cache, batch, out, None)

    def _request_lengths(self, batch: ForwardBatch, recovery: Recovery) -> None:
        """Copy the lengths from the device if the host has only bounds. In a capture, split the graph for the copy."""
        from .graph import ACTIVE
        from .ops import alias

        capture, step = ACTIVE.get(), (batch.mode, batch.step)
        if capture is None:
            if not self._plans.of(batch).exact:
                recovery.fetch(step, batch.prefix_lens)
                recovery.keep(batch.prefix_lens)
        elif not capture.warming:
            capture.split(Point(recovery, self._plans, step, alias(batch.prefix_lens)))

    def _attend_pages(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Call the operator over the pages. With `lse`, read only the prefix, unmasked; else read prefix and tail."""
        from .ops import PagedAttention

        causal, pick = self._mask_and_lists(batch, lse)
        target = out if out.is_contiguous() else torch.empty_like(q)
        tables, lse = self._metadata.tables(batch), self._no_lse if lse is None else lse
        self._call(PagedAttention(q, cache.k, cache.v, tables, causal, self._scale, target, lse), batch, pick)
        if target is not out:
            out.copy_(target)

    def _call(self, call: PagedAttention, batch: ForwardBatch, pick: Pick) -> None:
        """Launch a call with the batch's lists or, inside a capture, record it for updates."""
        from .graph import ACTIVE

        capture = ACTIVE.get()
        if capture is not None and not capture.warming:
            step = (batch.mode, batch.step)
            capture.add(call.k.data_ptr(), step, call, self._plans, pick, batch.padded_reqs)
        else:
            call.launch(*pick(self._lists(batch, warming=capture is not None)))

    def _mask_and_lists(self, batch: ForwardBatch, lse: torch.Tensor | None) -> tuple[torch.Tensor | None, Pick]:
        """Return the mask of a pass over the pages, and its choice of lists: of prefix and tail, or of the prefix."""
        if lse is not None:
            return None, _prefix
        return None if _has_single_rows(batch) else self._metadata.triangle, _whole

    def _lists(self, batch: ForwardBatch, warming: bool) -> HostLists:
        """Return exact lists, from the host or the device. For a warm-up bounds are enough: its output is not read."""
        lists = self._plans.of(batch)
        if lists.exact or warming:
            return lists
        if self._recovery is not None:
            return self._recovery.lists((batch.mode, batch.step))
        raise LengthsError(
            f"the fused operator needs exact host lengths, got {type(lists.host).__name__}: a bound would shift the "
            "diagonal of the causal mask; settle the lengths first, or make the geometry with overlap"
        )

    def _attend_tree(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        from .ops import TailAttention

        tree = self._metadata.tree(batch)
        reqs, rows = batch.padded_reqs, batch.q_lens[0]
        self._attend_pages(q, cache, batch, tree.prefix_out, tree.prefix_lse)
        for pages, tail in ((cache.k, tree.k), (cache.v, tree.v)):
            torch.index_select(pages.flatten(0, 1), 0, tree.slots, out=tail)
        blocked, keys = (reqs, rows, *q.shape[1:]), (reqs, batch.tail_lens[0], *tree.k.shape[1:])
        TailAttention(
            q.view(blocked), tree.k.view(keys), tree.v.view(keys), tree.mask, self._scale, tree.tail_out.view(blocked),
            tree.tail_lse,
        ).launch()  # fmt: skip
        # The prefix has the weight e^a / (e^a + e^b) = sigmoid(a - b), where a and b are the log-sum-exps of prefix and
        # tail. Without a prefix the weight is zero.
        torch.sub(tree.prefix_lse.view_as(tree.weight), tree.tail_lse.transpose(1, 2), out=tree.weight)
        tree.weight.sigmoid_().mul_(tree.has_prefix)
        prefix, tail = tree.merged
        prefix.copy_(tree.prefix_out.view(blocked))
        tail.copy_(tree.tail_out.view(blocked))
        torch.lerp(tail, prefix, tree.weight, out=tail)
        out.copy_(tail.view(out.shape))


def _has_single_rows(batch: ForwardBatch) -> bool:
    """Return true if each request has at most one row. This row sees all its keys, so it needs no mask.

    CANN 9.1 selects its decode kernel for one row per request, without a mask and without a log-sum-exp.
    """
    return max(batch.q_lens) <= 1


def _whole(lists: HostLists) -> tuple[list[int], list[int]]:
    return lists.rows, lists.whole


def _prefix(lists: HostLists) -> tuple[list[int], list[int]]:
    return lists.rows, lists.prefix
