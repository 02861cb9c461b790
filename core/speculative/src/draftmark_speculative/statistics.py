"""What an engine has done so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Statistics:
    """Counters of an engine.

    Attributes:
        tokens: tokens emitted to requests.
        rounds: verify or decode forwards whose tokens are here; extends: prefill forwards.
        verified: requests summed over rounds, so that accepted / verified is the mean accepted length. A request that
            had ended while the round ran does not count.
        accepted: tokens those rounds yielded, the target's own token included.
        host_syncs: waits for the device, one a round and one a prefill that ends a prompt.
        plain: of the rounds, those that were plain decoding.
        rows: query rows of all rounds, padding included: what their forwards computed.
        late: results of requests that had ended before they came, with overlap: work done in vain.
        preemptions: requests sent back to wait because pages ran out.
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
        """Tokens per request and round; 1 without speculation."""
        return self.accepted / self.verified if self.verified else 0.0
