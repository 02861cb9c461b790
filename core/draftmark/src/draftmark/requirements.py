"""Data that a backend needs from the engine. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class HostLengthsNeed(StrEnum):
    """Precision of the host's prefix lengths that `AttentionBackend.plan` needs, from weakest to strongest."""

    NONE = "none"
    UPPER_BOUND = "upper_bound"
    RECOVERED = "recovered"
    """Exact lengths, which the backend copies from the device when the host has only a bound. `attend` and `replay` may
    then wait for the batch's prefix lengths; `plan` and `write_metadata` must not."""
    EXACT = "exact"

    @classmethod
    def strongest(cls, needs: Iterable[HostLengthsNeed]) -> HostLengthsNeed:
        """Return the strongest of `needs`, which satisfies all of them."""
        return max(needs, key=tuple(cls).index)


@dataclass(frozen=True)
class Requirements:
    """Data that a backend needs from the engine for one geometry. The defaults fit a backend without host decisions.

    Attributes:
        host_lengths: knowledge of prefix lengths that `plan` needs on the host. EXACT is incompatible with
            `Limits.overlap`, because the host then lags the device by one step.
        unique_slots: no two rows of a batch may write the same KV slot, padding rows included. Each padded request then
            gets its own null pages; see `Geometry.null_pages`.
    """

    host_lengths: HostLengthsNeed = HostLengthsNeed.NONE
    unique_slots: bool = False
