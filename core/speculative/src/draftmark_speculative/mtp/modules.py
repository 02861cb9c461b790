"""Drafter with several MTP modules: one pass over all of them drafts a chain, one token a module.

Let L tokens be committed, so that the root is token L, and n modules. At position p, module i (from 0) reads the hidden
state of module i - 1 at p and token p + 1 + i. So at position L - 1 module 0 reads the root, and every later module the
draft of the one before. Keys and values of module i at the newest i positions follow from drafts. After the next round
these positions are read again, with the accepted tokens: DRAFT_EXTEND has n - 1 rows before the D accepted ones. Their
features and tokens are kept between rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from draftmark import Mode
from draftmark.runtime import (
    BatchBuffers,
    Exact,
    ForwardBatch,
    GraphKey,
    HostLengths,
    Program,
    Unknown,
    UpperBound,
    VerifyResult,
)

from ..drafting import Drafting
from ..drafts import Prefill, Round, Speculation
from ..eagle.drafter import Accepted
from ..layers import AttentionLayers
from ..models import CausalLM
from ..request import Request
from ..state import DeviceState, GraphRunner
from .head import MtpHead


class ModulesDrafter(Drafting):
    """Drafts a chain with n MTP modules over the engine's state, eagerly or captured.

    Between rounds this object keeps, by state row, the drafts and the newest n - 1 features and following tokens.

    Args:
        layers: attention layers of the modules, one each.
    """

    def __init__(
        self,
        speculation: Speculation,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        runner: GraphRunner,
    ) -> None:
        head, geometry = cast(MtpHead, layers.model), layers.geometry
        super().__init__(speculation, geometry, state)
        self.modes, self._runner = (Mode.VERIFY,), runner
        self._model, self._head, self._layers = model, head, layers
        self.lookahead = self._count = geometry.draft.num_modules
        self._batch = BatchBuffers(geometry, model.device)
        rows, device, kept = 2 * geometry.max_reqs, model.device, self._count - 1
        self._drafts = torch.zeros(rows, self._count, dtype=torch.int64, device=device)
        self._features = torch.zeros(rows, kept, model.hidden_size, dtype=model.dtype, device=device)
        self._tokens = torch.zeros(rows, kept, dtype=torch.int64, device=device)
        self._chain = torch.arange(self._count, device=device).expand(geometry.max_reqs, -1)
        self._accepted = Accepted(geometry, model.hidden_size, model.dtype, device)
        self.taps = model.tap(head.feature_layers)

    def capture(self) -> None:
        """Capture DRAFT_EXTEND at every captured batch size, on null rows."""
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            self._state.fill((), size)
            batch = self._extension(size, size, self._layers.lengths_at_capture(size))
            self._layers.plan(batch)
            self._runner.capture(GraphKey(Program.DRAFT_EXTEND, size), partial(self._take_over, batch))

    def extend(self, prefill: Prefill) -> None:
        """Run all modules over the rows of a prefill, and draft for the requests with a prompt that ends in it."""
        batch, tokens, last = prefill.batch, prefill.tokens.clone(), prefill.last
        self._layers.plan(batch)
        self._layers.begin(batch)
        first = batch.q_indptr[torch.searchsorted(batch.q_indptr, last.int(), right=True) - 1].long()
        known, hidden = [tokens[0].index_select(0, last)], prefill.features
        for module in range(self._count):
            # The last rows of a prompt read the token that was just chosen, and drafts. A short chunk has fewer rows.
            for back, token in enumerate(reversed(known)):
                row = last - back
                own = row >= first
                row = torch.where(own, row, last)
                tokens[module].index_copy_(0, row, torch.where(own, token, tokens[module].index_select(0, row)))
            hidden = self._run(module, tokens[module], hidden, batch.positions)
            known.append(self._best(hidden.index_select(0, last)))
        self._drafts.index_copy_(0, prefill.ended, torch.stack(known[1:], 1))
        self._keep_newest(prefill)

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Write the chain that the last pass over the modules drafted into the state."""
        drafts = self._drafts.index_select(0, self._state.rows[:padded])
        self._state.set_draft_tokens(padded, drafts, self._chain[:padded])
        return Round(Mode.VERIFY, padded)

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Store the accepted path for DRAFT_EXTEND."""
        self._accepted.write(batch.prefix_lens, result, features)

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Run all modules over the accepted path and the rows before it, and draft the next chain."""
        batch = self._extension(padded, num_reqs, self._earlier(host))
        self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT_EXTEND, padded), partial(self._take_over, batch))

    # -- device work that graphs capture --------------------------------------------------------------------

    def _take_over(self, batch: ForwardBatch) -> None:
        size, rows, kept, accepted = batch.padded_reqs, batch.q_lens[0], self._count - 1, self._accepted
        state = self._state.rows[:size]
        lens = accepted.prefix_lens[:size]
        start = (lens - kept).clamp(min=0)
        self._gather(batch, start, state)
        # Entry i of both sequences belongs to position L - (n - 1) + i. Entries before position 0 are left out.
        features = torch.cat((self._features.index_select(0, state), accepted.features[:size]), 1)
        tokens = torch.cat((self._tokens.index_select(0, state), accepted.tokens[:size].clamp(min=0)), 1)
        tokens = torch.cat((tokens, tokens.new_zeros(size, self._count)), 1)
        skipped = (start - (lens - kept)).long()[:, None]
        newest = kept + accepted.accept_lens[:size, None] - 1
        entry = (skipped + torch.arange(rows, device=tokens.device)).clamp(max=rows - 1)
        hidden = _rows_at(features, entry).flatten(0, 1)
        for module in range(self._count):
            hidden = self._run(module, tokens.gather(1, entry + module).flatten(), hidden, batch.positions)
            last = _rows_at(hidden.view(size, rows, -1), newest - skipped)[:, 0]
            tokens.scatter_(1, newest + 1 + module, self._best(last)[:, None])
        drafted = torch.arange(1, self._count + 1, device=tokens.device)
        self._drafts.index_copy_(0, state, tokens.gather(1, newest + drafted))
        older = newest - torch.arange(kept - 1, -1, -1, device=tokens.device)
        self._features.index_copy_(0, state, _rows_at(features, older))
        self._tokens.index_copy_(0, state, tokens.gather(1, older))

    def _run(self, module: int, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        attend = partial(self._layers.attend, module)
        hidden: torch.Tensor = self._head(self._model.embed(tokens), fused, positions, attend, module)
        return hidden

    def _best(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the most probable token of each row; a NaN row gives a token too."""
        return self._head.logits(hidden, self._model.lm_head).argmax(-1)

    def _keep_newest(self, prefill: Prefill) -> None:
        """Keep the newest n - 1 features and following tokens of each request, of this prefill and before."""
        ends, kept, rows = prefill.batch.q_indptr[1:].long(), self._count - 1, prefill.rows
        counts = prefill.batch.q_indptr.diff().long()[:, None]
        back = torch.arange(kept - 1, -1, -1, device=ends.device)
        here, at = back < counts, (ends[:, None] - 1 - back).clamp(min=0)
        older = (kept - 1 - back + counts).clamp(max=max(0, kept - 1)).expand_as(here)
        for store, found in ((self._tokens, prefill.tokens[0]), (self._features, prefill.features)):
            before = store.index_select(0, rows)
            index, mine = older, here
            if store.dim() == 3:
                index, mine = (one[..., None].expand_as(before) for one in (older, here))
            store.index_copy_(0, rows, torch.where(mine, found[at], before.gather(1, index)))

    def _gather(self, batch: ForwardBatch, prefix_lens: torch.Tensor, rows: torch.Tensor) -> None:
        batch.prefix_lens.copy_(prefix_lens)
        torch.index_select(self._state.page_table, 0, rows, out=batch.page_table)
        self._layers.tree_ops.write_tail(batch)
        self._layers.begin(batch)

    def _extension(self, padded: int, num_reqs: int, host: HostLengths) -> ForwardBatch:
        return self._batch.uniform(Mode.DRAFT_EXTEND, 0, padded, num_reqs, host, tree=False)

    def _earlier(self, host: HostLengths) -> HostLengths:
        """Return host lengths of batches that start n - 1 tokens earlier."""
        if isinstance(host, Unknown):
            return host
        kind = Exact if isinstance(host, Exact) else UpperBound
        return kind(tuple(max(0, length - self._count + 1) for length in host.lens))


def _rows_at(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return entries ``index [R, m]`` of each request of ``rows [R, n, width]``."""
    return rows.gather(1, index[..., None].expand(-1, -1, rows.shape[-1]))
