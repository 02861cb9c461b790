"""Counters of an engine's work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counters of an engine since its start.

    Attributes:
        tokens: tokens emitted to requests.
        rounds: verify or decode forwards with results on the host.
        extends: prefill forwards.
        verified: number of live requests, summed over rounds; accepted / verified is the mean accepted length.
            A request that ended while the round ran is not counted.
        accepted: tokens that the rounds yielded for those requests, the target's own token included. Tokens after
            the end of a request count too, although they are not emitted.
        plain: rounds that were plain decoding.
        rows: query rows that all rounds computed, padding included.
        host_syncs: waits for the device: one a round, and one for each prefill that ends a prompt.
        late: results that arrived after their request had ended (only with overlap); wasted work.
        preemptions: requests sent back to the waiting queue because pages ran out.
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

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted tokens per request and round; 1 without speculation."""
        return self.accepted / self.verified if self.verified else 0.0
