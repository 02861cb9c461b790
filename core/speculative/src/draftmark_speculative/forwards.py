"""Target forwards over the engine's static state: prefill, and the round that verifies drafts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import (
    ForwardBatch,
    GraphKey,
    HostLengths,
    Program,
    ragged,
    to_device,
)

from .drafting import Drafting
from .drafts import Prefill, Round
from .layers import AttentionLayers
from .models import CausalLM
from .ragged import RaggedRows
from .request import Request
from .sampling import Sampling
from .scheduler import by_row
from .state import DeviceState, GraphRunner

PROGRAMS = {
    Mode.DECODE: Program.DECODE,
    Mode.VERIFY: Program.VERIFY,
    Mode.RAGGED_VERIFY: Program.RAGGED_VERIFY,
}

Chunk = tuple[Request, int]
"""Pair of a request and the number of its tokens to store."""


class RoundResult(NamedTuple):
    """Result of a round.

    Attributes:
        tokens, accept_lens, accept_index: see `VerifyResult`.
        saved: length of the checkpoint of recurrent state that each request saved, or 0: int32 ``[R]``; None without
            checkpoints.
    """

    tokens: torch.Tensor
    accept_lens: torch.Tensor
    accept_index: torch.Tensor
    saved: torch.Tensor | None


class Forwards:
    """Runs the target: EXTEND eagerly; DECODE, VERIFY and RAGGED_VERIFY eagerly or by graph replay.

    No forward copies data from the device to the host. Plain decoding is a round with one node per request. A chain
    is a tree with a causal mask.

    Args:
        layers: attention layers of the target.
        drafting: runs after every prefill, and keeps the data of each round that drafting needs.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        sampling: Sampling,
        drafting: Drafting,
        runner: GraphRunner,
    ) -> None:
        self._model, self._layers, self._state = model, layers, state
        self._sampling, self._drafting, self._runner = sampling, drafting, runner
        self._geometry: Geometry = layers.geometry
        self._ragged_rows = RaggedRows(layers.geometry, state.device) if drafting.budgets else None

    # -- prefill ------------------------------------------------------------------------------------------

    def prefill(self, chunks: Sequence[Chunk], host: HostLengths) -> tuple[list[Request], torch.Tensor]:
        """Store the chunks' tokens in one ragged forward and advance the device lengths. Never captured.

        Returns:
            The requests with all tokens stored, and the next token of each: int64 ``[n]``, on the device. The token is
            also written to the state for the next round.
        """
        state, device = self._state, self._state.device
        counts = tuple(count for _, count in chunks)
        rows = to_device(by_row([request for request, _ in chunks]), device)
        prefix_lens, table = state.lengths.device.index_select(0, rows), state.page_table.index_select(0, rows)
        states = self._layers.states
        slots = None if states is None else states.slots.device.index_select(0, rows)
        batch = ragged(self._geometry, prefix_lens, table, counts, host, state_slots=slots)
        ends = [
            (request, end - 1)
            for (request, n), end in zip(chunks, accumulate(counts), strict=True)
            if request.computed + n == len(request.tokens)
        ]
        ended = [request for request, _ in ends]
        last = to_device([row for _, row in ends], device)
        self._layers.plan(batch)
        logits, features = self._forward(batch, to_device(_tokens(chunks, 0), device), last)
        requests = to_device([request.id for request in ended], device)
        chosen = self._sampling.choose(logits, requests, batch.positions.index_select(0, last))
        ended_rows = to_device(by_row(ended), device)
        state.pending.index_copy_(0, ended_rows, chosen)
        if features is not None:
            following = to_device([_tokens(chunks, n + 1) for n in range(self._drafting.lookahead)], device)
            following[0].index_copy_(0, last, chosen)
            self._drafting.extend(Prefill(batch, features, following, rows, ended_rows, last))
        self._layers.commit(batch, None, state.lengths, rows)
        return ended, chosen

    # -- rounds -------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture every kind of round on null rows (dummy requests), the round with the most rows first."""
        sizes, drafting = self._geometry.limits.capture_batch_sizes, self._drafting
        rounds = [Round(mode, size) for mode in drafting.modes for size in sizes]
        rounds += [Round(Mode.RAGGED_VERIFY, budget) for budget in drafting.budgets]
        for kind in sorted(rounds, key=self._rows, reverse=True):
            padded = self.padded_reqs(kind)
            self._state.fill((), padded)
            batch = self._batch(kind, padded, self._layers.lengths_at_capture(padded))
            self._layers.plan(batch)
            self._runner.capture(GraphKey(PROGRAMS[kind.mode], kind.size), partial(self._verify, batch))

    def round(self, kind: Round, num_reqs: int, host: HostLengths) -> RoundResult:
        """Run one round over the filled state. Results are on the device; rows past `num_reqs` are undefined."""
        batch = self._batch(kind, num_reqs, host)
        self._layers.plan(batch)
        return self._runner.run(GraphKey(PROGRAMS[kind.mode], kind.size), partial(self._verify, batch))

    def padded_reqs(self, kind: Round) -> int:
        """Return the padded number of requests of a round; under a row budget, at most one request per row."""
        return min(self._geometry.max_reqs, kind.size) if kind.mode is Mode.RAGGED_VERIFY else kind.size

    def _rows(self, kind: Round) -> int:
        return kind.size if kind.mode is Mode.RAGGED_VERIFY else kind.size * self._geometry.extent(kind.mode).q_len

    def _batch(self, kind: Round, num_reqs: int, host: HostLengths) -> ForwardBatch:
        tree = kind.mode is not Mode.DECODE and self._geometry.draft.topk > 1
        if kind.mode is Mode.RAGGED_VERIFY:
            return self._state.batch.ragged_verify(kind.size, num_reqs, host, tree=tree)
        return self._state.batch.uniform(kind.mode, 0, kind.size, num_reqs, host, tree=tree)

    def _verify(self, batch: ForwardBatch) -> RoundResult:
        """Run one verify forward. Reads the static inputs, writes the static batch, advances lengths. Captured."""
        state, size, nodes = self._state, batch.padded_reqs, batch.q_lens[0]
        rows, drafts, parents = state.rows[:size], state.tokens[:size, :nodes], state.parents[:size, :nodes]
        drafts[:, 0].copy_(state.pending.index_select(0, rows))
        torch.index_select(state.lengths.device, 0, rows, out=batch.prefix_lens)
        torch.index_select(state.page_table, 0, rows, out=batch.page_table)
        if self._layers.states is not None:
            self._layers.states.fill(batch, rows)
        if batch.mode is Mode.RAGGED_VERIFY:
            drafts, parents, targets, features = self._targets_of_admitted(batch)
        else:
            targets, features = self._targets(batch, drafts, parents)
        result = self._layers.tree_ops.verify_tree(drafts, parents, targets)
        if features is not None:
            self._drafting.keep(batch, result, features)
        state.pending.index_copy_(0, rows, result.tokens.gather(1, result.accept_lens[:, None] - 1)[:, 0])
        return RoundResult(*result, self._layers.commit(batch, result, state.lengths, rows))

    def _targets(
        self, batch: ForwardBatch, drafts: torch.Tensor, parents: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the target's token after every node ``[R, D]``, and the features of all rows (one row per node)."""
        self._layers.tree_ops.write_tail(batch, parents)
        logits, features = self._forward(batch, drafts.clamp(min=0).reshape(-1))
        requests = self._state.requests[: len(drafts), None].expand_as(drafts).reshape(-1)
        return self._sampling.choose(logits, requests, batch.positions).view(drafts.shape), features

    def _targets_of_admitted(
        self, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the admitted trees (tokens, parents ``[R, D]``), the target's tokens after them, and the features."""
        assert self._ragged_rows is not None, "a drafting with budgets verifies raggedly"
        trees = self._drafting.admit(batch)
        placed = self._ragged_rows.write(batch, trees, self._layers.tree_ops)
        logits, features = self._forward(batch, placed.of_nodes(trees.tokens).clamp(min=0))
        requests = self._state.requests.index_select(0, placed.requests)
        chosen = self._sampling.choose(logits, requests, batch.positions)
        return trees.tokens, trees.parents, placed.by_node(chosen), features

    def _forward(
        self, batch: ForwardBatch, tokens: torch.Tensor, logits_rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run the model; return the logits of `logits_rows` and the features that drafting reads, or None."""
        self._layers.begin(batch)
        return self._model.forward_features(tokens, batch.positions, self._layers, self._drafting.taps, logits_rows)


def _tokens(chunks: Sequence[Chunk], shift: int) -> list[int]:
    """Return the chunks' tokens, or the tokens `shift` positions later; 0 where a token does not exist yet."""
    found: list[int] = []
    for request, count in chunks:
        first = request.computed + shift
        part = request.tokens[first : first + count]
        found += part + [0] * (count - len(part))
    return found
