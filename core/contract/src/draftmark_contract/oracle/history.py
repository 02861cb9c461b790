"""Token history: which KV slot holds which token of a request. The truth that metadata must describe.

Plain Python, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

NO_PARENT = -1
"""A tail slot that hangs on the committed prefix."""


@dataclass(frozen=True)
class Request:
    """One request in one forward.

    Attributes:
        prefix: committed tokens L.
        pages: page ids in the order of the request's positions; token n lives in ``pages[n // P]`` at ``n % P``.
        parents: for each tail slot the tail slot it continues, or `NO_PARENT`; parents come before children.
        rows: query rows; row j is tail slot ``len(parents) - rows + j``.
        live: False for padding.
        masks: for each tail slot the slots that it sees, itself among them; () where it sees its ancestors.
    """

    prefix: int
    pages: tuple[int, ...]
    parents: tuple[int, ...]
    rows: int
    live: bool = True
    masks: tuple[tuple[int, ...], ...] = ()

    @property
    def tail(self) -> int:
        """Tail slots T."""
        return len(self.parents)

    def lineage(self, slot: int) -> list[int]:
        """The tail slot and its ancestors, newest first."""
        line = []
        while slot != NO_PARENT:
            line.append(slot)
            slot = self.parents[slot]
        return line

    def seen(self, slot: int) -> list[int]:
        """Tail slots that a tail slot sees: itself and its ancestors, or what its mask names."""
        return list(self.masks[slot]) if self.masks else self.lineage(slot)

    def depth(self, slot: int) -> int:
        """Ancestors of a tail slot within the tail; it stands at position L + depth."""
        return self._depths[slot]

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        """Of every tail slot, once: a prefill of 900 rows would walk its chain a million times."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == NO_PARENT else found[parent] + 1)
        return tuple(found)

    def own_slot(self, row: int) -> int:
        """The tail slot of a query row."""
        return self.tail - self.rows + row

    def __str__(self) -> str:
        kind = "" if self.live else "padding "
        chain = all(parent == i - 1 for i, parent in enumerate(self.parents))
        tree = "chain" if chain else f"parents {list(self.parents)}"
        tree += f" masks {[list(one) for one in self.masks]}" if self.masks else ""
        return f"{kind}L={self.prefix} rows={self.rows} tail={self.tail} {tree} pages={_short(self.pages)}"


def chain(length: int) -> tuple[int, ...]:
    """Parents of a causal tail."""
    return tuple(range(-1, length - 1))


def kv_slots(request: Request, page_size: int) -> list[int]:
    """The KV slot of every token of the request, prefix first, by walking its pages."""
    slots: list[int] = []
    for page in request.pages:
        for offset in range(page_size):
            slots.append(page * page_size + offset)
    return slots[: request.prefix + request.tail]


def _short(pages: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, pages[:6]))
    return f"[{shown}{', …' if len(pages) > 6 else ''}]"
