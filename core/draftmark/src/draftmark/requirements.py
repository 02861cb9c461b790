"""What a backend needs of the engine that runs it. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class HostLengthsNeed(StrEnum):
    """What `AttentionBackend.plan` must know about prefix lengths on the host."""

    NONE = "none"
    UPPER_BOUND = "upper_bound"
    RECOVERED = "recovered"
    """Exact ones, which the backend reads back from the device where it is told a bound: `attend` and `replay` may then
    wait for the forward's prefix lengths, `plan` and `write_metadata` may not."""
    EXACT = "exact"

    @classmethod
    def strongest(cls, needs: Iterable[HostLengthsNeed]) -> HostLengthsNeed:
        """The need that covers all of `needs`."""
        return max(needs, key=tuple(cls).index)


@dataclass(frozen=True)
class Requirements:
    """What one geometry's backend needs of the engine; the defaults suit a backend that decides all on the device.

    Attributes:
        host_lengths: what `plan` must know of prefix lengths. EXACT rules out `Limits.overlap`, where the host is a
            round behind.
        unique_slots: no two rows of a batch, padded ones included, may write the same KV slot, so each padded request
            gets null pages of its own; see `Geometry.null_pages`.
    """

    host_lengths: HostLengthsNeed = HostLengthsNeed.NONE
    unique_slots: bool = False
