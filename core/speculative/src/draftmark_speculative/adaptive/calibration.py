"""How far a draft head's probabilities come true, by request and depth. On the device, updated inside the round."""

from __future__ import annotations

import torch

KEPT = 0.95
"""What remains of a depth's evidence behind each round that tried that depth."""
PRIOR = 4.0
"""Expected drafts for which a request is taken for its batch, and the batch at a depth for the depth above, before
their own count: a depth that was never tried would never be."""


class Calibration:
    """Accepted over expected drafts, decayed, by state row and depth; with little evidence the whole batch's.

    Args:
        rows: request rows and null rows of the state.
        levels: depths below the root.
    """

    def __init__(self, rows: int, levels: int, device: torch.device) -> None:
        self._expected = torch.zeros(rows, levels, device=device)
        self._accepted = torch.zeros(rows, levels, device=device)
        self._all = torch.zeros(2, levels, device=device)

    def ratios(self, rows: torch.Tensor) -> torch.Tensor:
        """float32 ``[R, levels]``: the factor on a head's chances at each depth."""
        levels, above = [], torch.ones(1, device=rows.device)
        for expected_there, accepted_there in zip(*self._all[:, :, None].unbind(), strict=True):
            above = (accepted_there + PRIOR * above) / (expected_there + PRIOR)
            levels.append(above)
        whole = torch.cat(levels)
        expected, accepted = self._expected.index_select(0, rows), self._accepted.index_select(0, rows)
        return (accepted + PRIOR * whole) / (expected + PRIOR)

    def update(self, rows: torch.Tensor, live: torch.Tensor, expected: torch.Tensor, accepted: torch.Tensor) -> None:
        """Take a round's evidence. Capturable.

        Args:
            rows: int64 ``[R]``, distinct; live: bool ``[R]``.
            expected, accepted: float32 ``[R, levels]``, chances summed over the children that were verified below the
                kept node at each depth, and whether one of them was kept.
        """
        tried = live[:, None] & (expected > 0)
        # A depth that a small budget leaves out keeps what is known of it: else it would look like the one above.
        kept, kept_of_all = 1 - (1 - KEPT) * tried, 1 - (1 - KEPT) * tried.any(0)
        for evidence, seen, total in zip(
            (self._expected, self._accepted), (expected, accepted), self._all, strict=True
        ):
            seen = torch.where(tried, seen, 0)
            evidence.index_copy_(0, rows, evidence.index_select(0, rows) * kept + seen)
            total.mul_(kept_of_all).add_(seen.sum(0))

    def age(self, rounds: int) -> None:
        """Let evidence fade by rounds that brought none, but for a round's worth of it."""
        for evidence in (self._expected, self._accepted, self._all):
            evidence.mul_(max(1 - KEPT, KEPT**rounds))

    def forget(self, rows: torch.Tensor | None = None) -> None:
        """Begin anew for rows that other requests have now; for everything without `rows`."""
        if rows is None:
            for evidence in (self._expected, self._accepted, self._all):
                evidence.zero_()
            return
        self._expected.index_fill_(0, rows, 0)
        self._accepted.index_fill_(0, rows, 0)
