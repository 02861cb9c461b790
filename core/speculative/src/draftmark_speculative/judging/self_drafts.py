"""A target that drafts for itself, in DRAFT forwards over its own KV. Each draft costs a whole forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftmark import TARGET_MODES, Mode
from draftmark.runtime import BatchBuffers, HostLengths

from ..drafts import Drafting, Round, Speculation
from ..layers import AttentionLayers
from ..models import CausalLM
from ..pending import FinishedForward
from ..request import Request
from ..state import DeviceState, GraphRunner
from .attention import DraftAttention, Reading, reading, target_layers

Rejected = Callable[[int, int, int, int, dict[int, Reading], dict[int, Reading]], None]
"""Receives a rejected draft: request id, position, draft token, target token, readings of drafter and target."""


@dataclass(frozen=True)
class SelfDrafts(Speculation):
    """Chains of greedy drafts by the target itself. Without faults every draft is accepted.

    Attributes:
        length: draft tokens a round.
        attention: makes the drafter's attention from the target's layers.
        rejected: receives the first rejected draft of each round.
    """

    length: int = 4
    attention: Callable[[AttentionLayers], DraftAttention] = DraftAttention
    rejected: Rejected = lambda *lost: None
    topk: int = 1

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """Nodes of a chain, root included."""
        return self.length + 1

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """One DRAFT forward for each draft token, and one level for the root."""
        return self.length + 1

    @property
    def target_modes(self) -> tuple[Mode, ...]:
        """Modes of the target, which also runs the draft steps."""
        return (*TARGET_MODES, Mode.DRAFT)

    def drafting(self, model: CausalLM, layers: AttentionLayers, state: DeviceState, runner: GraphRunner) -> Drafting:
        """Create a `SelfDrafter` over the target's layers."""
        return SelfDrafter(self, model, layers, state)


class SelfDrafter(Drafting):
    """Runs the target's draft steps eagerly, and compares each rejected draft's row with the target's row."""

    def __init__(self, speculation: SelfDrafts, model: CausalLM, layers: AttentionLayers, state: DeviceState) -> None:
        super().__init__(speculation, layers.geometry, state)
        self.modes = (Mode.VERIFY,)
        self._model, self._layers, self._rejected = model, layers, speculation.rejected
        self._attention, self._batch = speculation.attention(layers), BatchBuffers(layers.geometry, model.device)
        self._lens: list[int] = []
        self._drafts: list[list[int]] = []
        self._read: list[dict[int, list[Reading]]] = []
        self._verified: list[list[dict[int, Reading]]] = []

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Draft a chain below every root, one forward a token."""
        state, rows = self._state, self._state.rows[:padded]
        tokens, chosen = state.pending.index_select(0, rows), []
        self._lens, self._read = state.lengths.device.index_select(0, rows).tolist(), []
        for step in range(self._geometry.num_draft_steps):
            batch = self._batch.uniform(Mode.DRAFT, step, padded, len(requests), host, tree=False)
            batch.prefix_lens.copy_(state.lengths.device.index_select(0, rows))
            torch.index_select(state.page_table, 0, rows, out=batch.page_table)
            self._layers.tree_ops.write_tail(batch)
            self._attention.begin(batch)
            logits = self._model.forward(tokens, self._attention.positions(batch), self._attention)
            tokens = logits.argmax(-1)
            chosen.append(tokens)
            self._read.append(self._attention.readings)
        drafts = torch.stack(chosen, 1)
        self._drafts = drafts[: len(requests)].tolist()
        parents = torch.arange(drafts.shape[1], device=drafts.device).expand_as(drafts)
        state.set_draft_tokens(padded, drafts, parents)
        return Round(Mode.VERIFY, padded)

    def draft_extend(self, padded: int, num_reqs: int, host: HostLengths) -> None:
        """Record what the target's own rows of the round have read. There is no other KV to extend."""
        layers, table = target_layers(self._layers), self._state.page_table.index_select(0, self._state.rows[:padded])
        self._verified = [
            [
                {number: reading(layer, table[n], self._lens[n] + step) for number, layer in enumerate(layers)}
                for step in range(len(self._read))
            ]
            for n in range(num_reqs)
        ]

    def learn(self, sent: Round, finished: Sequence[FinishedForward], report: Sequence[float] | None) -> None:
        """Report each request's first rejected draft, with what drafter and target read in the row that chose it."""
        for n, one in enumerate(finished):
            accepted = len(one.tokens) - 1
            if accepted < len(self._drafts[n]):
                mine = {layer: rows[n] for layer, rows in self._read[accepted].items()}
                draft, target = self._drafts[n][accepted], one.tokens[-1]
                position = self._lens[n] + accepted + 1
                self._rejected(one.request.id, position, draft, target, mine, self._verified[n][accepted])
