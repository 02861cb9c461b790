"""Assignment of state slots to request rows, with one owner: `StateSlots`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftmark import BufferError
from draftmark.runtime import StatePool

from .allocator import CacheExhausted


class StateSlots:
    """Slots of recurrent state of all requests in an engine; the only owner of their assignment.

    Rows are those of `SequenceLengths`: 0 … max_rows-1 are request rows, and an equal number of null rows follows,
    starting at `first_null_row`. Null row i has null slot ``i % null_slots``, as has a request row without a slot.

    All pools of a model have the same slots, so one object serves them all. `take`, `give_back`, `lend`, `keep` and
    `release` are plain Python on the host. They enqueue writes of `device` and `save` on the current stream, so a slot
    may be given away while a round that uses it is under way.

    A checkpoint is a slot that belongs to no row: `lend` gives a row a spare slot, the device writes the checkpoint
    state into it when the row crosses a multiple of `Limits.state_interval`, and `keep` makes it the caller's.

    Args:
        max_rows: request rows.
        pools: the model's pools, one or more, with equal numbers of slots.
        poison: fill a slot with NaN in every pool when it is given out.

    Attributes:
        device: int32 ``[2 · max_rows]``, slot of each row. Owned by this object; read-only for all other code.
        save: int32 ``[2 · max_rows]``, lent slot of each row, or its null slot. Owned by this object.
        first_null_row: index of the first null row, equal to max_rows.

    Raises:
        BufferError: max_rows is out of range, or a pool has another number of slots.
    """

    def __init__(self, max_rows: int, pools: Sequence[StatePool], *, poison: bool = False) -> None:
        if type(max_rows) is not int or max_rows < 1:
            raise BufferError(f"max_rows is {max_rows!r}, but it must be an integer >= 1; take it from the geometry")
        num_slots, null_slots = pools[0].num_slots, pools[0].null_slots
        for pool in pools:
            if (pool.num_slots, pool.null_slots) != (num_slots, null_slots):
                raise BufferError(
                    f"a pool has {pool.num_slots} slots ({pool.null_slots} null slots), but the first has {num_slots} "
                    f"({null_slots}); create all pools of a model with the same numbers"
                )
        null = torch.arange(max_rows, dtype=torch.int32) % null_slots
        self.device = torch.cat((null, null)).to(pools[0].state.device)
        self.save = self.device.clone()
        self.first_null_row = max_rows
        self._nulls, self._poisoned = null_slots, tuple(pools) if poison else ()
        self._total = num_slots - null_slots
        self._free = list(range(num_slots - 1, null_slots - 1, -1))
        self._slots: dict[int, int] = {}
        self._lent: dict[int, int] = {}
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        """Number of slots that belong to no row and hold no checkpoint."""
        return len(self._free)

    def slot_of(self, row: int) -> int | None:
        """Return the slot of a request row, or None."""
        return self._slots.get(self._request_row(row))

    def lent_to(self, row: int) -> int | None:
        """Return the spare slot that is lent to a request row, or None."""
        return self._lent.get(self._request_row(row))

    def take(self, row: int) -> int:
        """Give a request row a free slot and return it. Its contents are undefined until the row has a prefix.

        Raises:
            CacheExhausted: no slot is free.
            BufferError: the row has a slot already, or is not a request row.
        """
        return self._assign(self._slots, self.device, row, "a slot")

    def lend(self, row: int) -> int:
        """Lend a request row a spare slot for its next checkpoint, and return it. Raises as `take` does."""
        return self._assign(self._lent, self.save, row, "a spare slot")

    def give_back(self, row: int) -> None:
        """Free the slot and the spare slot of a request row, when its request ends or is preempted."""
        self._request_row(row)
        for owned, rows in ((self._slots, self.device), (self._lent, self.save)):
            slot = owned.pop(row, None)
            if slot is not None:
                self._free.append(slot)
                rows[row].fill_(row % self._nulls)

    def keep(self, row: int) -> int:
        """Detach the row's spare slot, which holds a checkpoint now, and return it; the caller calls `release` later.

        Raises:
            BufferError: the row has no spare slot.
        """
        slot = self._lent.pop(self._request_row(row), None)
        if slot is None:
            raise BufferError(f"row {row} has no spare slot, so it has no checkpoint; call lend() before the round")
        self._kept.add(slot)
        self.save[row].fill_(row % self._nulls)
        return slot

    def release(self, slot: int) -> None:
        """Free a slot of `keep`.

        Raises:
            BufferError: the slot is no checkpoint.
        """
        if slot not in self._kept:
            raise BufferError(f"slot {slot!r} is not a checkpoint; release each slot of keep() once")
        self._kept.remove(slot)
        self._free.append(slot)

    def _assign(self, owned: dict[int, int], rows: torch.Tensor, row: int, what: str) -> int:
        if self._request_row(row) in owned:
            raise BufferError(f"row {row} has {what} already ({owned[row]}); give it back first")
        if not self._free:
            raise CacheExhausted(1, 0, self._total, "state slots")
        slot = self._free.pop()
        owned[row] = slot
        rows[row].fill_(slot)
        for pool in self._poisoned:  # no step may read a slot's earlier contents at L = 0
            for tensor in (pool.state, pool.conv):
                tensor[:, slot].fill_(float("nan"))
        return slot

    def _request_row(self, row: int) -> int:
        if type(row) is not int or not 0 <= row < self.first_null_row:
            raise BufferError(
                f"row {row!r} is not a request row (0 … {self.first_null_row - 1}); null rows have null slots"
            )
        return row
