"""The step path: four plain methods over the arena's buffers, the plan's host lists and the operators."""

from __future__ import annotations

import torch

from draftmark import Geometry, LengthsError
from draftmark.runtime import Arena, ForwardBatch, KVCache, sinks_of

from . import sizing
from .lengths import HostLists, Plans
from .metadata import Metadata, is_tree
from .recovery import Point, Recovery


class AscendBackend:
    """One code path for eager, capture and replay.

    A causal tail is one fused call over the pages. A tree is two: the pages of the prefix, unmasked, and the gathered
    tail under a small dense mask; their log-sum-exps say how much of each the result is.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        a = geometry.attention
        self.geometry = geometry
        self.arena = arena
        self._scale = a.softmax_scale if a.softmax_scale is not None else a.head_dim**-0.5
        self._metadata = Metadata(geometry, arena)
        self._plans = Plans()
        self._no_lse = torch.empty(1, dtype=torch.float32, device=self._metadata.triangle.device)
        # Without overlap nothing is ever asked, and no graph records an event for it.
        self._recovery = Recovery(arena[sizing.HOST_LENS], self._plans) if geometry.limits.host_lags else None

    def plan(self, batch: ForwardBatch) -> None:
        """Note the host's lists; eager calls take them, and so do the updates of a replay."""
        self._plans.set(batch)

    def write_metadata(self, batch: ForwardBatch) -> None:
        """Slots and block tables; of a tree also its tail's slots and mask."""
        self._metadata.write(batch)
        if self._recovery is not None and batch.device.type == "npu":
            self._ask(batch, self._recovery)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> None:
        """Scatter the rows to their slots."""
        from . import ops

        ops.scatter_kv(k, v, cache.k, cache.v, self._metadata.slots32(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Attention of all rows, in one pass or two."""
        sinks_of(cache, self.geometry)  # raises where some are given: `support` refuses them
        q = q.contiguous()
        if is_tree(batch):
            self._attend_tree(q, cache, batch, out)
        else:
            self._attend_pages(q, cache, batch, out, None)

    def _ask(self, batch: ForwardBatch, recovery: Recovery) -> None:
        """Say where the lengths are, for a replay; or fetch them now, for an eager forward that has bounds."""
        from .graph import ACTIVE
        from .ops import alias

        capture, step = ACTIVE.get(), (batch.mode, batch.step)
        if capture is None:
            if not self._plans.of(batch).exact:
                recovery.fetch(step, batch.prefix_lens)
                recovery.keep(batch.prefix_lens)
        elif not capture.warming:
            capture.cut(Point(recovery, self._plans, step, alias(batch.prefix_lens)))

    def _attend_pages(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """One call over the pages: with `lse` over the prefix, unmasked; else over prefix and tail."""
        from .graph import ACTIVE
        from .ops import PagedAttention

        causal = self._metadata.triangle if lse is None and not _lone_rows(batch) else None
        pick = _whole if lse is None else _prefix
        target = out if out.is_contiguous() else torch.empty_like(q)
        tables, lse = self._metadata.tables(batch), self._no_lse if lse is None else lse
        call = PagedAttention(q, cache.k, cache.v, tables, causal, self._scale, target, lse)
        capture = ACTIVE.get()
        if capture is not None and not capture.warming:
            step = (batch.mode, batch.step)
            capture.add(cache.k.data_ptr(), step, call, self._plans, pick, batch.padded_reqs)
        else:
            call.launch(*pick(self._lists(batch, warming=capture is not None)))
        if target is not out:
            out.copy_(target)

    def _lists(self, batch: ForwardBatch, warming: bool) -> HostLists:
        """Exact lists, from the host or from the device; a warm-up takes any, because nobody reads what it gives."""
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
        # Share of the prefix, e^a / (e^a + e^b) = sigmoid(a - b); nothing where there is no prefix.
        torch.sub(tree.prefix_lse.view_as(tree.weight), tree.tail_lse.transpose(1, 2), out=tree.weight)
        tree.weight.sigmoid_().mul_(tree.has_prefix)
        prefix, tail = tree.merged
        prefix.copy_(tree.prefix_out.view(blocked))
        tail.copy_(tree.tail_out.view(blocked))
        torch.lerp(tail, prefix, tree.weight, out=tail)
        out.copy_(tail.view(out.shape))


def _lone_rows(batch: ForwardBatch) -> bool:
    """Whether each request brings one row at most, which sees all its keys: no mask, as CANN's decode kernel wants it.

    The decode kernel of CANN 9.1 is chosen without a mask, without a log-sum-exp and with one row a request.
    """
    return max(batch.q_lens) <= 1


def _whole(lists: HostLists) -> tuple[list[int], list[int]]:
    return lists.rows, lists.whole


def _prefix(lists: HostLists) -> tuple[list[int], list[int]]:
    return lists.rows, lists.prefix
