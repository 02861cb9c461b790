"""Adaptive drafting with drafts that are made on the host: n-gram look-up or a custom drafter.

The host has all drafts before the round, so it chooses the budget from this round's drafts. It learns their acceptance
probabilities by ground (class of evidence; see `grounds`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from draftmark import Mode
from draftmark.runtime import ForwardBatch, HostLengths, to_device

from ..drafting import Drafting
from ..drafts import DraftTree, Round, Speculation
from ..layers import AttentionLayers
from ..pending import FinishedForward
from ..ragged import Admitted
from ..request import Request
from ..scheduler import by_row
from ..state import DeviceState
from .candidates import Candidates
from .costs import CostTable
from .grounds import Grounds
from .measure import Rehearsal, measure
from .policy import Load, Policy

if TYPE_CHECKING:
    from ..drafting import RunRound


class AdaptiveHostDrafting(Drafting):
    """Drafts on the host, and verifies only the likeliest nodes. A request without a guess has one row."""

    def __init__(
        self,
        speculation: Speculation,
        layers: AttentionLayers,
        state: DeviceState,
        costs: CostTable | None,
        probe_share: float,
    ) -> None:
        super().__init__(speculation, layers.geometry, state)
        self._layers, self._costs, self._probe_share = layers, costs, probe_share
        self.modes, self.budgets = (Mode.DECODE,), layers.geometry.limits.row_budgets
        self._candidates = Candidates(layers.geometry, state, layers.geometry.draft.num_draft_tokens - 1, None)
        self._grounds = Grounds()
        self._trees: list[DraftTree] = []

    def ready(self, run_round: RunRound) -> None:
        """Measure the cost of rounds, unless a cost table was given."""
        table = self._costs
        if table is None:
            rehearsal = Rehearsal(self._geometry, self._state, self._layers.pages, self._seat)
            table = measure(rehearsal, run_round)
            rehearsal.clear()
            self._candidates.chances.zero_()
        self._policy = Policy(table, self.budgets, self._probe_share)

    def draft(self, requests: Sequence[Request], padded: int, host: HostLengths) -> Round:
        """Propose trees, choose a budget for them, and return the round."""
        self._trees = self._propose(requests)
        chances = [self._grounds.chances(r.id, tree) for r, tree in zip(requests, self._trees, strict=True)]
        budget = self._decide(requests, padded, chances)
        if budget is None:
            return Round(Mode.DECODE, padded)
        size = min(budget, self._geometry.max_reqs)
        self._state.fill(requests, size)
        self._state.set_draft_trees(self._trees, size)
        width = self._geometry.draft.num_draft_tokens
        rows: list[list[float]] = [[*mine, *[0.0] * (width - len(mine))] for mine in chances]
        self._candidates.chances[: len(rows)].copy_(to_device(rows, self._state.device, self._candidates.chances.dtype))
        return Round(Mode.RAGGED_VERIFY, budget)

    def admit(self, batch: ForwardBatch) -> Admitted:
        """Return the likeliest nodes of the host's trees, up to the row budget."""
        return self._candidates.admit(batch)

    def learn(self, sent: Round, finished: Sequence[FinishedForward], report: Sequence[float] | None) -> None:
        """Learn which drafts were accepted. Host drafts forbid overlap, so the trees are this round's."""
        if sent.mode is Mode.RAGGED_VERIFY:
            for one, tree in zip(finished, self._trees, strict=True):
                self._grounds.learn(one.request.id, tree, one.tokens)
            self._grounds.only({one.request.id for one in finished})

    def _decide(self, requests: Sequence[Request], padded: int, chances: Sequence[Sequence[float]]) -> int | None:
        """Return the row budget with the most expected tokens a second, or None if plain decoding is better."""
        live = len(requests)
        alive = sorted(
            (s for tree, mine in zip(self._trees, chances, strict=True) for s in _survival(tree, mine)[1:]),
            reverse=True,
        )
        if not alive:
            return None
        gains = [0.0, *accumulate(alive)]
        kv_tokens = sum(self._state.lengths.upper_bound(by_row(requests)).lens)
        return self._policy.decide(
            Load(live, padded, kv_tokens), lambda budget: live + gains[min(budget - live, len(alive))]
        )

    def _seat(self, load: int) -> None:
        self._candidates.chances.fill_(1)


def _survival(tree: DraftTree, chances: Sequence[float]) -> list[float]:
    """Return the product of the chances on each node's path, as `survival` does on the device; 1 for the root."""
    alive = [1.0]
    for node in range(1, len(tree)):
        alive.append(chances[node] * alive[tree.parents[node]])
    return alive
