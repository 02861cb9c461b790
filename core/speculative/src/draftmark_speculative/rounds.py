"""The device side of one round: gather, verify, walk, compact, advance. The same function eagerly and captured."""

from __future__ import annotations

from functools import partial

import torch

from draftmark.batch import ForwardBatch, Tree
from draftmark.geometry import Geometry, Mode
from draftmark.graphs import GraphKey, Program
from draftmark.lengths import HostLengths
from draftmark.tree import VerifyResult

from .eagle.drafter import HeadDrafter
from .forced import ForcedAcceptance
from .graph_runner import GraphRunner
from .layers import AttentionLayers
from .models import CausalLM
from .sampling import Sampling
from .state import DeviceState

PROGRAMS = {Mode.DECODE: Program.DECODE, Mode.VERIFY: Program.VERIFY}


class Rounds:
    """Runs DECODE and VERIFY rounds over the static state, eagerly or by replaying graphs.

    Plain decoding is the same code with one node a request; a chain is a tree whose mask is causal.

    Args:
        drafter: the head that drafts on the device, which is left what it has to take over; or None.
        forced: a benchmark's switch; or None.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        sampling: Sampling,
        programs: GraphRunner,
        drafter: HeadDrafter | None = None,
        forced: ForcedAcceptance | None = None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._state = state
        self._sampling = sampling
        self._programs = programs
        self._drafter = drafter
        self._forced = forced
        self._geometry: Geometry = layers.geometry

    def capture(self, modes: tuple[Mode, ...]) -> None:
        """Capture every mode at every captured batch size, largest first, on batches of null rows."""
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            for mode in modes:
                self._state.fill((), size)
                batch = self._batch(mode, size, size, self._layers.lengths_at_capture(size))
                self._layers.plan(batch)
                self._programs.capture(GraphKey(PROGRAMS[mode], size), partial(self._body, batch))

    def run(self, mode: Mode, padded: int, num_reqs: int, host: HostLengths) -> VerifyResult:
        """One round over the filled state. The verdict is on the device; its rows past `num_reqs` mean nothing."""
        batch = self._batch(mode, padded, num_reqs, host)
        self._layers.plan(batch)
        return self._programs.run(GraphKey(PROGRAMS[mode], padded), partial(self._body, batch))

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
        logits, features = self._forward(drafts.clamp(min=0).reshape(-1), batch)
        requests = state.requests[:size, None].expand(-1, nodes).reshape(-1)
        targets = self._sampling.choose(logits, requests, batch.positions).view(size, nodes)
        if self._forced is not None:
            targets = self._forced.rewrite(batch, state.requests[:size], drafts, parents, targets)
        verdict = self._layers.tree_ops.verify_tree(drafts, parents, targets)
        if isinstance(batch.tail, Tree):
            self._layers.compact(batch, verdict)
        if self._drafter is not None and features is not None:
            self._drafter.accepted.write(batch.prefix_lens, verdict, features)
        state.pending.index_copy_(0, rows, verdict.tokens.gather(1, verdict.accept_lens[:, None] - 1)[:, 0])
        state.lengths.advance(rows, verdict.accept_lens)
        return verdict

    def _forward(self, tokens: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of every row, and the features that the drafter reads."""
        if self._drafter is None:
            return self._model.forward(tokens, batch.positions, self._layers), None
        return self._model.forward_features(tokens, batch.positions, self._layers, self._drafter.taps)
