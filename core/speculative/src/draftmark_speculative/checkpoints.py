"""Checkpoints of recurrent states: spare slots that rounds write, and their way into the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from .prefix_cache import PrefixCache
from .request import Request
from .states import StateLayers


class Checkpoints:
    """Lends each request a spare slot, and keeps the slot when the device has written a checkpoint into it.

    The device decides whether a round crosses a multiple of the interval, and reports the length. The host needs no
    length for that, so it works one round ahead of the device too.
    """

    def __init__(self, states: StateLayers, cache: PrefixCache) -> None:
        self._slots, self._interval, self._cache = states.slots, states.interval, cache

    def until(self, computed: int) -> int:
        """Return the most tokens of a prefill after `computed`: it ends at the next multiple of the interval."""
        return self._interval - computed % self._interval

    def lend(self, request: Request, free_rows: int) -> None:
        """Lend a request a spare slot unless it has one. Other checkpoints give up theirs, the oldest first.

        Args:
            free_rows: rows without a request. One free slot is left for each of them.
        """
        assert request.row is not None, "only a request with a row has slots"
        if self._slots.lent_to(request.row) is not None:
            return
        while self._slots.free <= free_rows:
            if not self._cache.evict_checkpoint():
                return
        self._slots.lend(request.row)

    def lent(self, requests: Sequence[Request]) -> list[tuple[int, int | None]]:
        """Return the row assignment and the spare slot of each request at the time of a round."""
        return [
            (request.assignment, None if request.row is None else self._slots.lent_to(request.row))
            for request in requests
        ]

    def stored(self, request: Request, count: int) -> None:
        """Keep the checkpoint of a prefill that was just enqueued, if it ends at one.

        Args:
            count: tokens of the request that are stored after the prefill.
        """
        assert request.row is not None, "a prefill has a row"
        if count % self._interval == 0 and self._slots.lent_to(request.row) is not None:
            request.checkpoints.append((count, self._slots.keep(request.row)))

    def finished(self, request: Request, lent: tuple[int, int | None], saved: int) -> None:
        """Keep the checkpoint that a round has saved.

        Args:
            lent: of `lent`, when the round was enqueued. A request that has lost its row since has lost its slot too.
            saved: length of the checkpoint, as the device reported it; 0 for none.
        """
        assignment, slot = lent
        if not saved or slot is None or request.row is None or request.assignment != assignment:
            return
        if self._slots.lent_to(request.row) == slot:
            request.checkpoints.append((saved, self._slots.keep(request.row)))
