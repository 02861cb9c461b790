"""A target that drafts for itself, in DRAFT forwards over its own KV. Each level of a tree costs a whole forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftmark import TARGET_MODES, Geometry, Mode
from draftmark.runtime import BatchBuffers, HostLengths

from ..drafting import DeviceSpeculation, Drafting
from ..drafts import Round
from ..layers import AttentionLayers
from ..models import CausalLM
from ..pending import FinishedForward
from ..request import Request
from ..state import DeviceState, GraphRunner
from .attention import DraftAttention, Reading, reading, target_layers

Rejected = Callable[[int, int, int, int, dict[int, Reading], dict[int, Reading]], None]
"""Receives a rejected draft: request id, position, draft token, target token, readings of drafter and target."""


@dataclass(frozen=True)
class SelfDrafts(DeviceSpeculation):
    """Trees of drafts by the target itself: a greedy branch, which the target accepts whole, and other branches.

    Branch c begins with the token that is c-th after the best one. Branches change beams from step to step.

    Attributes:
        length: draft tokens of each branch.
        topk: branches; 1 drafts chains.
        attention: makes the drafter's attention from the target's layers.
        rejected: receives the first rejected draft of each round.
    """

    length: int = 4
    attention: Callable[[AttentionLayers], DraftAttention] = DraftAttention
    rejected: Rejected = lambda *lost: None
    topk: int = 1

    @property
    def num_draft_tokens(self) -> int:  # type: ignore[override]
        """Nodes of a tree, root included."""
        return self.topk * self.length + 1

    @property
    def num_steps(self) -> int:  # type: ignore[override]
        """One DRAFT forward for each level, and one level for the root."""
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
        """Draft a tree below every root, one forward a level."""
        state, rows, k = self._state, self._state.rows[:padded], self._geometry.draft.topk
        tokens, levels = state.pending.index_select(0, rows)[:, None].expand(-1, k), list[torch.Tensor]()
        self._lens, self._read = state.lengths.device.index_select(0, rows).tolist(), []
        for step in range(self._geometry.num_draft_steps):
            batch = self._batch.uniform(Mode.DRAFT, step, padded, len(requests), host, tree=k > 1)
            batch.prefix_lens.copy_(state.lengths.device.index_select(0, rows))
            torch.index_select(state.page_table, 0, rows, out=batch.page_table)
            if k > 1:
                self._layers.tree_ops.write_tail(batch, _slots(self._geometry, step).to(rows.device).expand(padded, -1))
            else:
                self._layers.tree_ops.write_tail(batch)
            self._attention.path = tuple(k * i + i % k for i in range(step + 1))
            self._attention.begin(batch)
            beams = tokens.roll(step, 1).flatten()
            logits = self._model.forward(beams, self._attention.positions(batch), self._attention)
            by_branch = logits.view(padded, k, -1).roll(-step, 1)
            tokens = by_branch.argmax(-1) if step else by_branch[:, 0].topk(k, -1).indices
            levels.append(tokens)
            self._read.append(self._attention.readings)
        self._drafts = torch.stack(levels, 1)[: len(requests), :, 0].tolist()
        drafts = torch.cat(levels, 1)
        parents = (torch.arange(drafts.shape[1], device=drafts.device) - k + 1).clamp(min=0).expand_as(drafts)
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
            pairs = zip(self._drafts[n], one.tokens, strict=False)
            accepted = next((level for level, (draft, token) in enumerate(pairs) if draft != token), None)
            if accepted is not None:
                mine = {layer: rows[n] for layer, rows in self._read[accepted].items()}
                draft, target = self._drafts[n][accepted], one.tokens[accepted]
                position = self._lens[n] + accepted + 1
                self._rejected(one.request.id, position, draft, target, mine, self._verified[n][accepted])


def _slots(geometry: Geometry, step: int) -> torch.Tensor:
    """Return the parent slot of each tail slot at a draft step, int64 ``[tail slots]``; -1 for the first ones.

    Beam b continues beam b - 1 of the step before.
    """
    topk, slot = geometry.draft.topk, torch.arange(geometry.extent(Mode.DRAFT, step).tail_len)
    before = slot // topk - 1
    return torch.where(before < 0, -1, before * topk + (slot % topk - 1) % topk)
