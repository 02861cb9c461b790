"""Calibration of a draft head's probabilities by request and depth. Updated on the device inside the round."""

from __future__ import annotations

import torch

KEPT = 0.95
"""Decay factor of a depth's evidence, applied in each round that tries that depth."""
PRIOR = 4.0
"""Weight of the prior, in expected drafts.

A request's prior is the ratio of the whole batch. The batch's prior at a depth is its ratio at the depth above:
otherwise a depth without evidence would never be tried."""


class Calibration:
    """Tracks the ratio of accepted to expected drafts for each state row and tree depth. Old rounds decay.

    Args:
        rows: number of rows of the state, null rows included.
        levels: number of depths below the root.
    """

    def __init__(self, rows: int, levels: int, device: torch.device) -> None:
        self._expected = torch.zeros(rows, levels, device=device)
        self._accepted = torch.zeros(rows, levels, device=device)
        self._all = torch.zeros(2, levels, device=device)

    def ratios(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the factors that correct the head's probabilities, by request and depth: float32 ``[R, levels]``."""
        levels, above = [], torch.ones(1, device=rows.device)
        for expected_there, accepted_there in zip(*self._all[:, :, None].unbind(), strict=True):
            above = (accepted_there + PRIOR * above) / (expected_there + PRIOR)
            levels.append(above)
        whole = torch.cat(levels)
        expected, accepted = self._expected.index_select(0, rows), self._accepted.index_select(0, rows)
        return (accepted + PRIOR * whole) / (expected + PRIOR)

    def update(self, rows: torch.Tensor, live: torch.Tensor, expected: torch.Tensor, accepted: torch.Tensor) -> None:
        """Add a round's expected and accepted drafts. Capturable.

        Args:
            rows: int64 ``[R]``, distinct state rows.
            live: bool ``[R]``, False for padding rows.
            expected: float32 ``[R, levels]``, sum of the chances of the verified children of the kept node, by depth.
            accepted: float32 ``[R, levels]``, 1 where one of these children was kept, else 0.
        """
        tried = live[:, None] & (expected > 0)
        # A depth without verified drafts keeps its sums: with decay, its ratio would drift to that of the depth above.
        kept, kept_of_all = 1 - (1 - KEPT) * tried, 1 - (1 - KEPT) * tried.any(0)
        for evidence, seen, total in zip(
            (self._expected, self._accepted), (expected, accepted), self._all, strict=True
        ):
            seen = torch.where(tried, seen, 0)
            evidence.index_copy_(0, rows, evidence.index_select(0, rows) * kept + seen)
            total.mul_(kept_of_all).add_(seen.sum(0))

    def age(self, rounds: int) -> None:
        """Decay the sums for `rounds` rounds without drafts, but never below the weight of one round."""
        for evidence in (self._expected, self._accepted, self._all):
            evidence.mul_(max(1 - KEPT, KEPT**rounds))

    def forget(self, rows: torch.Tensor | None = None) -> None:
        """Reset the sums of `rows` (state rows with new requests), or of all rows if `rows` is None."""
        if rows is None:
            for evidence in (self._expected, self._accepted, self._all):
                evidence.zero_()
            return
        self._expected.index_fill_(0, rows, 0)
        self._accepted.index_fill_(0, rows, 0)
