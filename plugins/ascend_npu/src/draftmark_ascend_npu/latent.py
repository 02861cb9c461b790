"""Backend for latent rows (MLA): the fused operator with query_rope and key_rope, over a cache in two buffers."""

from __future__ import annotations

import torch

from draftmark import Geometry
from draftmark.runtime import Arena, ForwardBatch, KVCache, sinks_of

from . import sizing
from .backend import AscendBackend
from .lengths import HostLists
from .metadata import is_tree


class AscendLatentBackend(AscendBackend):
    """Runs attention over latent rows, with one code path for eager mode, capture and replay.

    Queries are staged: the operator needs their two parts contiguous, and a power of two of heads. A chain is one
    fused call. In EXTEND a request of more than 16 rows is several requests of the call. A tree is a fused call over
    the prefix without a mask, and products over the gathered tail under its mask, since the operator has no mask for
    latent rows. Log-sum-exps give the weights of the merge.
    """

    def __init__(self, geometry: Geometry, arena: Arena) -> None:
        super().__init__(geometry, arena)
        buffers = {name: arena[name] for name in arena}
        self._staged = tuple(buffers[name] for name in (sizing.QUERIES, sizing.QUERY_RESTS, sizing.OUTPUTS))
        self._lse = buffers.get(sizing.LSES)

    def write_kv(self, k: torch.Tensor, v: torch.Tensor | None, cache: KVCache, batch: ForwardBatch) -> None:
        """Store the latent rows of the batch at their slots. v is None."""
        from . import ops

        ops.scatter_latent(k, *cache.parts, self._metadata.slots32(batch))

    def attend(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, out: torch.Tensor) -> None:
        """Compute attention of all rows: by one call, or for draft trees by a call, a small product and a merge."""
        sinks_of(cache, self.geometry)  # raises if the cache has sinks, which the operator does not serve
        if not is_tree(batch):
            out.copy_(self._attend_rows(q, cache, batch, None))
            return
        assert self._lse is not None, "a mode that may have trees has the buffer"
        lse = self._lse[: batch.num_rows]
        prefix = self._attend_rows(q, cache, batch, lse)
        tail, tail_lse = self._attend_tail(q, cache, batch)
        # The prefix has the weight e^a / (e^a + e^b) = sigmoid(a - b), where a and b are the log-sum-exps of prefix and
        # tail. Without a prefix the weight is zero.
        weight = torch.sub(lse[:, : q.shape[1]].reshape(tail_lse.shape), tail_lse).sigmoid_()
        weight.view(batch.padded_reqs, -1).mul_(self._metadata.marks(batch).has_prefix.view(-1, 1))
        out.copy_(torch.lerp(tail, prefix.float().reshape(tail.shape), weight).view(out.shape))

    def _attend_rows(
        self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch, lse: torch.Tensor | None
    ) -> torch.Tensor:
        """Call the operator over the pages and return its output without the padding heads, ``[rows, heads, D]``.

        With `lse`, read only the prefix, unmasked; else read prefix and tail.
        """
        from .ops import PagedAttention

        heads, (queries, rests, outputs) = q.shape[1], (one[: batch.num_rows] for one in self._staged)
        values, rest = cache.part_pages
        queries[:, :heads].copy_(q[..., : queries.shape[2]])
        rests[:, :heads].copy_(q[..., queries.shape[2] :])
        tables, (causal, pick) = self._metadata.tables(batch), self._mask_and_lists(batch, lse)
        if not batch.uniform:
            tables, pick = self._metadata.piece_tables(batch), _pieces
        call = PagedAttention(
            queries, values, values, tables, causal, self._scale, outputs,
            self._no_lse if lse is None else lse, rests, rest,
        )  # fmt: skip
        self._call(call, batch, pick)
        return outputs[:, :heads]

    def _attend_tail(self, q: torch.Tensor, cache: KVCache, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend to the visible tail slots in float32. A request has at most 16 of them per row.

        Returns:
            Output ``[R, q · heads, D]`` and log-sum-exps ``[R, q · heads, 1]``, natural.
        """
        marks, reqs, heads = self._metadata.marks(batch), batch.padded_reqs, q.shape[1]
        rows, slots = batch.q_lens[0], batch.tail_lens[0]
        gathered = [part.flatten(0, 1).index_select(0, marks.slots) for part in cache.parts]
        keys = torch.cat(gathered, -1).float().view(reqs, slots, -1)
        logits = torch.bmm(q.float().reshape(reqs, rows * heads, -1), keys.transpose(1, 2)).mul_(self._scale)
        hidden = marks.mask.view(reqs, rows, 1, slots).bool()
        logits.view(reqs, rows, heads, slots).masked_fill_(hidden, float("-inf"))
        values = keys[..., : self.geometry.attention.value_width]
        return torch.bmm(logits.softmax(-1), values.contiguous()), logits.logsumexp(-1, keepdim=True)


def _pieces(lists: HostLists) -> tuple[list[int], list[int]]:
    return lists.piece_lists
