"""The device side of one round: gather, verify, walk, compact, advance. The same function eagerly and captured."""

from __future__ import annotations

from functools import partial

import torch

from ..batch import ForwardBatch, Tree
from ..cache import slots_of
from ..geometry import Geometry, Mode
from ..graphs import GraphKey, GraphState, Program
from ..lengths import HostLengths, Unknown
from ..tree import write_tail
from .layers import AttentionLayers
from .models import CausalLM
from .sampling import Sampling
from .state import DeviceState
from .verify import Verdict, walk

PROGRAMS = {Mode.DECODE: Program.DECODE, Mode.VERIFY: Program.VERIFY}


class Rounds:
    """Runs DECODE and VERIFY rounds over the static state, eagerly or by replaying graphs.

    Plain decoding is the same code with one node a request; a chain is a tree whose mask is causal.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        sampling: Sampling,
        graphs: GraphState | None,
    ) -> None:
        self._model = model
        self._layers = layers
        self._state = state
        self._sampling = sampling
        self._graphs = graphs
        self._geometry: Geometry = layers.geometry

    def capture(self, modes: tuple[Mode, ...]) -> None:
        """Capture every mode at every captured batch size, largest first, on batches of null rows."""
        assert self._graphs is not None
        for size in sorted(self._geometry.limits.capture_batch_sizes, reverse=True):
            for mode in modes:
                self._state.fill((), (), size, self._geometry.extent(mode).q_len)
                # Planned as if every request were as long as can be: what plan() decides is frozen in the graph.
                batch = self._batch(mode, size, size, Unknown(size, self._geometry.max_prefix_len))
                self._layers.plan(batch)
                self._graphs.capture(GraphKey(PROGRAMS[mode], size), partial(self._body, batch))

    def run(self, mode: Mode, padded: int, num_reqs: int, host: HostLengths) -> Verdict:
        """One round over the filled state. The verdict is on the device; its rows past `num_reqs` mean nothing."""
        batch = self._batch(mode, padded, num_reqs, host)
        self._layers.plan(batch)
        if self._graphs is None:
            return self._body(batch)
        verdict: Verdict = self._graphs.replay(GraphKey(PROGRAMS[mode], padded))
        return verdict

    def _batch(self, mode: Mode, padded: int, num_reqs: int, host: HostLengths) -> ForwardBatch:
        tree = mode is Mode.VERIFY and self._geometry.draft.topk > 1
        return self._state.batch.uniform(mode, 0, padded, num_reqs, host, tree=tree)

    def _body(self, batch: ForwardBatch) -> Verdict:
        """Captured. Reads the static inputs, writes the static batch, advances the lengths."""
        state, size, nodes = self._state, batch.padded_reqs, batch.q_lens[0]
        rows, drafts, parents = state.rows[:size], state.tokens[:size, :nodes], state.parents[:size, :nodes]
        torch.index_select(state.lengths.device, 0, rows, out=batch.prefix_lens)
        torch.index_select(state.page_table, 0, rows, out=batch.page_table)
        write_tail(batch, self._geometry, parents)
        self._layers.begin(batch)
        logits = self._model.forward(drafts.clamp(min=0).reshape(-1), batch.positions, self._layers)
        requests = state.requests[:size, None].expand(-1, nodes).reshape(-1)
        targets = self._sampling.choose(logits, requests, batch.positions).view(size, nodes)
        verdict = walk(drafts, parents, targets)
        if isinstance(batch.tail, Tree):
            self._compact(batch, verdict.path)
        state.lengths.advance(rows, verdict.counts)
        return verdict

    def _compact(self, batch: ForwardBatch, path: torch.Tensor) -> None:
        """The i-th kept node's KV moves from its tail slot to slot i; the root is in place already."""
        prefix = batch.prefix_lens.long()[:, None]
        page_size = self._geometry.attention.page_size
        target = torch.arange(1, path.shape[1], device=path.device).expand(len(path), -1)
        self._layers.move(
            slots_of(batch.page_table, prefix + path[:, 1:], page_size).view(-1),
            slots_of(batch.page_table, prefix + target, page_size).view(-1),
        )
