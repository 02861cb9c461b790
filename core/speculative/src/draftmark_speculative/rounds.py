"""The device side of one round: gather, verify, walk, compact, advance. The same function eagerly and captured."""

from __future__ import annotations

from functools import partial

import torch

from draftmark import Geometry, Mode
from draftmark.runtime import ForwardBatch, GraphKey, HostLengths, Program, Tree, VerifyResult

from .drafts import Drafting
from .layers import AttentionLayers
from .models import CausalLM
from .sampling import Sampling
from .state import DeviceState, GraphRunner

PROGRAMS = {Mode.DECODE: Program.DECODE, Mode.VERIFY: Program.VERIFY}


class Rounds:
    """Runs DECODE and VERIFY rounds over the static state, eagerly or by replaying graphs.

    Plain decoding is the same code with one node a request; a chain is a tree whose mask is causal.

    Args:
        drafting: it is left what it has to take over.
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

    def capture(self) -> None:
        """Capture every mode of the drafting at every captured batch size, largest first, on batches of null rows."""
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            for mode in self._drafting.modes:
                self._state.fill((), size)
                batch = self._batch(mode, size, size, self._layers.lengths_at_capture(size))
                self._layers.plan(batch)
                self._runner.capture(GraphKey(PROGRAMS[mode], size), partial(self._body, batch))

    def run(self, mode: Mode, padded: int, num_reqs: int, host: HostLengths) -> VerifyResult:
        """One round over the filled state. The result is on the device; its rows past `num_reqs` mean nothing."""
        batch = self._batch(mode, padded, num_reqs, host)
        self._layers.plan(batch)
        return self._runner.run(GraphKey(PROGRAMS[mode], padded), partial(self._body, batch))

    def _batch(self, mode: Mode, padded: int, num_reqs: int, host: HostLengths) -> ForwardBatch:
        tree = mode is Mode.VERIFY and self._geometry.draft.topk > 1
        return self._state.batch.uniform(mode, 0, padded, num_reqs, host, tree=tree)

    def _body(self, batch: ForwardBatch) -> VerifyResult:
        """Captured. Reads the static inputs, writes the static batch, advances the lengths."""
        state, size, nodes = self._state, batch.padded_reqs, batch.q_lens[0]
        rows, drafts, parents = state.rows[:size], state.tokens[:size, :nodes], state.parents[:size, :nodes]
        drafts[:, 0].copy_(state.pending.index_select(0, rows))
        torch.index_select(state.lengths.device, 0, rows, out=batch.prefix_lens)
        torch.index_select(state.page_table, 0, rows, out=batch.page_table)
        self._layers.tree_ops.write_tail(batch, parents)
        self._layers.begin(batch)
        tokens = drafts.clamp(min=0).reshape(-1)
        logits, features = self._model.forward_features(tokens, batch.positions, self._layers, self._drafting.taps)
        requests = state.requests[:size, None].expand(-1, nodes).reshape(-1)
        targets = self._sampling.choose(logits, requests, batch.positions).view(size, nodes)
        result = self._layers.tree_ops.verify_tree(drafts, parents, targets)
        if isinstance(batch.tail, Tree):
            self._layers.compact(batch, result)
        if features is not None:
            self._drafting.keep(batch, result, features)
        state.pending.index_copy_(0, rows, result.tokens.gather(1, result.accept_lens[:, None] - 1)[:, 0])
        state.lengths.advance(rows, result.accept_lens)
        return result
