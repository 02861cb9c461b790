"""Drafter with a head, of EAGLE or MTP: prefill, DRAFT_EXTEND over the accepted path, and drafting of the next tree.

A row of the head at position p reads the target's feature of p and the token of p + 1. Let L tokens be committed, so
that the root is token L. Then rows 0 … L - 1 are complete, and the newest row predicts the root's children. The head
keeps its KV in a separate pool under the target's page ids. One page table and one set of lengths serve both models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Protocol, cast

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import BatchBuffers, ForwardBatch, GraphKey, HostLengths, Program, VerifyResult

from ..drafting import Drafting
from ..drafts import Prefill, Round, Speculation
from ..layers import AttentionLayers, Layered
from ..models import CausalLM
from ..request import Request
from ..state import DeviceState, GraphRunner
from .layer import Attend
from .tree_builder import DraftTreeBuilder, best_tokens


class Head(Layered, Protocol):
    """One-layer draft model, as a `HeadDrafter` runs it. `DraftHead` specifies rows, features and results."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the head reads, counted as in `FeatureTaps`."""

    @property
    def hidden_size(self) -> int:
        """Width of a feature and of the head's output."""

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.fuse`."""

    def __call__(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """See `DraftHead.forward`."""

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.logits`."""

    def output_rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.output_rows`."""

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """See `DraftHead.target_tokens`."""


class Accepted:
    """Holds the accepted path that VERIFY writes and DRAFT_EXTEND reads, in static tensors. Rows are batch entries.

    Args:
        nodes: most nodes of a path, and rows of the tensors; D by default.

    Attributes:
        prefix_lens: int32 ``[max_reqs]``, committed tokens *before* the round: the start of the path.
        tokens: int64 ``[max_reqs, nodes]``, the token that follows each accepted node; -1 beyond accept_lens.
        accept_lens: int64 ``[max_reqs]``, number of accepted nodes.
        features: ``[max_reqs, nodes, width]``, the target's features of each accepted node; undefined after the path.
    """

    def __init__(
        self, geometry: Geometry, width: int, dtype: torch.dtype, device: torch.device, nodes: int | None = None
    ) -> None:
        reqs, nodes = geometry.max_reqs, nodes or geometry.draft.num_draft_tokens
        self.prefix_lens = torch.zeros(reqs, dtype=torch.int32, device=device)
        self.tokens = torch.full((reqs, nodes), -1, dtype=torch.int64, device=device)
        self.accept_lens = torch.ones(reqs, dtype=torch.int64, device=device)
        self.features = torch.zeros(reqs, nodes, width, dtype=dtype, device=device)

    def write(self, prefix_lens: torch.Tensor, result: VerifyResult, features: torch.Tensor) -> None:
        """Store a verified round's accepted path: prefix lengths, tokens and features. Capturable.

        Args:
            prefix_lens: int32 ``[R]``, prefix lengths of the verified batch.
            features: ``[R · D, width]``, features of every node.
        """
        size, nodes = result.accept_index.shape
        by_node, most = features.view(size, nodes, -1), min(nodes, self.tokens.shape[1])
        path = result.accept_index[:, :most, None].expand(-1, -1, by_node.shape[-1])
        self.prefix_lens[:size].copy_(prefix_lens)
        self.tokens[:size, :most].copy_(result.tokens[:, :most])
        self.accept_lens[:size].copy_(result.accept_lens)
        self.features[:size, :most].copy_(by_node.gather(1, path))


class HeadDrafter(Drafting):
    """Drafts with a head: runs its EXTEND, DRAFT_EXTEND and DRAFT over the engine's state, eagerly or captured.

    Between rounds this object keeps the output of each request's newest complete row: the hidden state and the topk
    most probable next tokens. So the first round after a prefill drafts like every other round.

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
        head, geometry = cast(Head, layers.model), layers.geometry
        super().__init__(speculation, geometry, state)
        self.modes, self._runner = (Mode.VERIFY,), runner
        self._model, self._head, self._layers = model, head, layers
        self._topk: int = geometry.draft.topk
        self._attend = partial(layers.attend, 0)
        self._output_rows = head.output_rows(model.lm_head)
        self._batch = BatchBuffers(geometry, model.device)
        rows, width = 2 * geometry.max_reqs, head.hidden_size
        self._hidden = torch.zeros(rows, width, dtype=model.dtype, device=model.device)
        self._scores = torch.zeros(rows, self._topk, device=model.device)
        self._tokens = torch.zeros(rows, self._topk, dtype=torch.int64, device=model.device)
        self.accepted = Accepted(geometry, len(head.feature_layers) * width, model.dtype, model.device)
        self.taps = model.tap(head.feature_layers)

    def capture(self) -> None:
        """Capture DRAFT_EXTEND and DRAFT at every captured batch size, on null rows."""
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            self._state.fill((), size)
            host = self._layers.lengths_at_capture(size)
            batch = self._extension(size, size, host)
            self._layers.plan(batch)
            self._runner.capture(GraphKey(Program.DRAFT_EXTEND, size), partial(self._take_over, batch))
            self.capture_steps(size, host)

    def capture_steps(self, size: int, host: HostLengths) -> None:
        """Capture the draft steps for `size` batch entries; the state must be filled already."""
        steps = self._steps(size, size, host)
        for batch in steps:
            self._layers.plan(batch)
        self._runner.capture(GraphKey(Program.DRAFT, size), partial(self._draft, size, steps))

    def extend(self, prefill: Prefill) -> None:
        """Run the head over the rows of a prefill."""
        batch = prefill.batch
        self._layers.plan(batch)
        self._layers.begin(batch)
        hidden = self._run(prefill.tokens[0], self._head.fuse(prefill.features), batch.positions)
        self._keep(prefill.ended, hidden.index_select(0, prefill.last))

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Build a tree below every root and write it into the state's tokens and parents."""
        self.grow(padded, len(requests), host)
        return Round(Mode.VERIFY, padded)

    def grow(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Run all draft steps of a round; the state must be filled already."""
        steps = self._steps(padded, num_reqs, host)
        for batch in steps:
            self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT, padded), partial(self._draft, padded, steps))

    def keep(self, batch: ForwardBatch, result: VerifyResult, features: torch.Tensor) -> None:
        """Store the accepted path for DRAFT_EXTEND."""
        self.accepted.write(batch.prefix_lens, result, features)

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Run the head over the accepted path."""
        batch = self._extension(padded, num_reqs, host)
        self._layers.plan(batch)
        self._runner.run(GraphKey(Program.DRAFT_EXTEND, padded), partial(self._take_over, batch))

    # -- device work that graphs capture --------------------------------------------------------------------

    def _draft(self, size: int, steps: list[ForwardBatch]) -> None:
        """Run all draft steps of a round, then write the tree of the best nodes."""
        state, rows = self._state, self._state.rows[:size]
        growth = DraftTreeBuilder(self._scores.index_select(0, rows), self._tokens.index_select(0, rows))
        hidden = self._hidden.index_select(0, rows)[:, None].expand(-1, self._topk, -1)
        for batch in steps:
            if batch.step == 0:
                self._gather(batch, state.lengths.device.index_select(0, rows))
            self._layers.tree_ops.write_tail(batch, growth.place())
            self._layers.begin(batch)
            hidden = self._run(growth.tokens.flatten(), hidden.flatten(0, 1), batch.positions)
            scores, tokens = self._best(hidden)
            growth.extend(scores.view(size, self._topk, -1), tokens.view(size, self._topk, -1))
            # A beam reads the output of the row that it continues.
            continued = growth.parents[:, :, None].expand(-1, -1, hidden.shape[-1])
            hidden = hidden.view(size, self._topk, -1).gather(1, continued)
        self._plant(size, growth)

    def _plant(self, size: int, growth: DraftTreeBuilder) -> None:
        """Write the draft trees into the engine's state."""
        tokens, parents = growth.best(self._geometry.draft.num_draft_tokens - 1)
        self._state.set_draft_tokens(size, tokens, parents)

    def _take_over(self, batch: ForwardBatch) -> None:
        """Run the head over the accepted path and keep the newest row's output."""
        size, accepted = batch.padded_reqs, self.accepted
        self._gather(batch, accepted.prefix_lens[:size])
        self._layers.tree_ops.write_tail(batch)
        self._layers.begin(batch)
        # Rows beyond the path have undefined inputs. This is harmless: the next draft steps overwrite their KV.
        tokens = accepted.tokens[:size].clamp(min=0).flatten()
        fused = self._head.fuse(accepted.features[:size].flatten(0, 1))
        hidden = self._run(tokens, fused, batch.positions).view(size, batch.q_lens[0], -1)
        newest = (accepted.accept_lens[:size] - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        self._keep(self._state.rows[:size], hidden.gather(1, newest)[:, 0])

    def _run(self, tokens: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self._head(self._model.embed(tokens), fused, positions, self._attend)
        return hidden

    def _best(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores, indices = best_tokens(self._head.logits(hidden, self._output_rows), self._topk)
        return scores, self._head.target_tokens(indices)

    def _keep(self, rows: torch.Tensor, hidden: torch.Tensor) -> None:
        scores, tokens = self._best(hidden)
        self._hidden.index_copy_(0, rows, hidden)
        self._scores.index_copy_(0, rows, scores)
        self._tokens.index_copy_(0, rows, tokens)

    def _gather(self, batch: ForwardBatch, prefix_lens: torch.Tensor) -> None:
        batch.prefix_lens.copy_(prefix_lens)
        rows = self._state.rows[: batch.padded_reqs]
        torch.index_select(self._state.page_table, 0, rows, out=batch.page_table)

    # -- batches of the draft head --------------------------------------------------------------------------

    def _steps(self, padded: int, num_reqs: int, host: HostLengths) -> list[ForwardBatch]:
        """Return one batch per draft step. All share static tensors; each step rewrites the tail (tree mask)."""
        tree = self._topk > 1
        return [
            self._batch.uniform(Mode.DRAFT, step, padded, num_reqs, host, tree=tree)
            for step in range(self._geometry.num_draft_steps)
        ]

    def _extension(self, padded: int, num_reqs: int, host: HostLengths) -> ForwardBatch:
        return self._batch.uniform(Mode.DRAFT_EXTEND, 0, padded, num_reqs, host, tree=False)
