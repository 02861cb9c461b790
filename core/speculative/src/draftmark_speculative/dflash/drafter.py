"""Drafter with a block head: stores context of the target's features, and drafts a block in one forward.

Let L tokens be committed, so that the root is token L. The context of tokens 0 … L - 1 is stored ahead, by forwards
that only store rows: EXTEND after a prefill, and a DRAFT_BLOCK over the accepted path after a round. Such a block has
room for every path, because a tree is no deeper than a block. Rows after the path have undefined inputs. This is
harmless: the next block stores its own rows there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from draftmark import Mode
from draftmark.runtime import BatchBuffers, ForwardBatch, GraphKey, HostLengths, Program, VerifyResult

from ..drafting import Drafting
from ..drafts import Prefill, Round, Speculation
from ..eagle.drafter import Accepted
from ..eagle.tree_builder import best_tokens
from ..layers import AttentionLayers
from ..models import CausalLM
from ..request import Request
from ..state import DeviceState, GraphRunner
from .head import BlockHead
from .tree import block_tree


class BlockDrafter(Drafting):
    """Drafts with a block head over the engine's state, eagerly or captured.

    Args:
        layers: attention layers of the head.
    """

    def __init__(
        self,
        speculation: Speculation,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        runner: GraphRunner,
    ) -> None:
        head, geometry = cast(BlockHead, layers.model), layers.geometry
        super().__init__(speculation, geometry, state)
        self.modes, self._runner = (Mode.VERIFY,), runner
        self._model, self._head, self._layers, self._topk = model, head, layers, speculation.topk
        self._batch = BatchBuffers(geometry, model.device)
        rows, width = head.config.block_size, head.config.num_features * model.hidden_size
        self._accepted = Accepted(geometry, width, model.dtype, model.device, rows)
        self._mask = torch.full((geometry.max_reqs, rows - 1), head.config.mask_token_id, device=model.device)
        self.taps = model.tap(head.config.feature_layers)

    def capture(self) -> None:
        """Capture storing and drafting at every captured batch size, on null rows."""
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            self._state.fill((), size)
            batch = self._block(size, size, self._layers.lengths_at_capture(size))
            for program, step in ((Program.DRAFT_EXTEND, self._store_accepted), (Program.DRAFT_BLOCK, self._draft)):
                self._layers.plan(batch)
                self._runner.capture(GraphKey(program, size), partial(step, batch))

    def extend(self, prefill: Prefill) -> None:
        """Store the context of the rows of a prefill."""
        self._layers.plan(prefill.batch)
        self._store(prefill.batch, prefill.features)

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Draft a block after every root, and write a chain or tree of its tokens into the state."""
        batch = self._block(padded, len(requests), host)
        self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT_BLOCK, padded), partial(self._draft, batch))
        return Round(Mode.VERIFY, padded)

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Keep the accepted path for `draft_extend`."""
        self._accepted.write(batch.prefix_lens, result, features)

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Store the context of the accepted path."""
        batch = self._block(padded, num_reqs, host)
        self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT_EXTEND, padded), partial(self._store_accepted, batch))

    # -- device work that graphs capture --------------------------------------------------------------------

    def _draft(self, batch: ForwardBatch) -> None:
        """Run the head over the blocks, then write the trees of the best nodes."""
        state, size, rows = self._state, batch.padded_reqs, batch.q_lens[0]
        self._gather(batch, state.lengths.device.index_select(0, state.rows[:size]))
        self._layers.begin(batch)
        roots = state.pending.index_select(0, state.rows[:size])
        tokens = torch.cat((roots[:, None], self._mask[:size]), 1).flatten()
        hidden = self._head(self._model.embed(tokens), batch.positions, self._layers.attend)
        logits = self._head.logits(hidden.view(size, rows, -1)[:, 1:].flatten(0, 1), self._model.lm_head)
        shape = size, rows - 1, self._topk
        scores, found = (one.view(shape) for one in best_tokens(logits, self._topk))
        state.set_draft_tokens(size, *block_tree(scores, found, self._geometry.draft.num_draft_tokens - 1))

    def _store_accepted(self, batch: ForwardBatch) -> None:
        """Store the context of the accepted paths."""
        size = batch.padded_reqs
        self._gather(batch, self._accepted.prefix_lens[:size])
        self._store(batch, self._accepted.features[:size].flatten(0, 1))

    def _store(self, batch: ForwardBatch, features: torch.Tensor) -> None:
        """Store keys and values of features in every layer, without attention."""
        self._layers.begin(batch)
        context = self._head.fuse(features)
        for layer in range(len(self._head.layers)):
            self._layers.store(layer, *self._head.keys_values(layer, context, batch.positions))

    def _gather(self, batch: ForwardBatch, prefix_lens: torch.Tensor) -> None:
        batch.prefix_lens.copy_(prefix_lens)
        rows = self._state.rows[: batch.padded_reqs]
        torch.index_select(self._state.page_table, 0, rows, out=batch.page_table)
        self._layers.tree_ops.write_tail(batch)

    def _block(self, padded: int, num_reqs: int, host: HostLengths) -> ForwardBatch:
        return self._batch.uniform(Mode.DRAFT_BLOCK, 0, padded, num_reqs, host, tree=False)
