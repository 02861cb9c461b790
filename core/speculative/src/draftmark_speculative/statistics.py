"""Counters of an engine's work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftmark import Mode

from .drafts import Round
from .request import Progress


@dataclass
class Statistics:
    """Counters of an engine since its start.

    Attributes:
        tokens: tokens emitted to requests.
        rounds: verify or decode forwards with results on the host.
        extends: prefill forwards.
        verified: number of live requests, summed over rounds; accepted / verified is the mean accepted length.
            A request that ended while the round ran is not counted.
        accepted: tokens that the rounds gave these requests, the target's own token included. Tokens after the end
            of a request are not counted.
        plain: rounds that were plain decoding.
        rows: query rows that all rounds computed, padding included.
        host_syncs: waits for the device: one a round, and one for each prefill that ends a prompt.
        late: results that arrived after their request had ended (only with overlap); wasted work.
        preemptions: requests sent back to the waiting queue because pages ran out.
        reused: tokens that requests took from the prefix cache instead of computing them.
    """

    tokens: int = 0
    rounds: int = 0
    extends: int = 0
    verified: int = 0
    accepted: int = 0
    plain: int = 0
    rows: int = 0
    host_syncs: int = 0
    late: int = 0
    preemptions: int = 0
    reused: int = 0

    def count_round(self, sent: Round, rows: int, progress: Sequence[Progress]) -> None:
        """Count a round after its requests have taken their tokens.

        Args:
            rows: query rows of the round, padding included.
            progress: the kept tokens of each request that was live when the results arrived.
        """
        self.rounds += 1
        self.plain += sent.mode is Mode.DECODE
        self.rows += rows
        self.verified += len(progress)
        self.accepted += sum(len(one.tokens) for one in progress)

    @property
    def mean_accepted(self) -> float:
        """Mean number of tokens that a request kept per round; 1 without speculation."""
        return self.accepted / self.verified if self.verified else 0.0
