"""Token histories: the KV slot of every token of a request. A backend's metadata must name exactly these slots.

Plain Python, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

NO_PARENT = -1
"""Parent of a tail slot that follows the committed prefix directly."""


@dataclass(frozen=True)
class Request:
    """Describes one request in one forward. Its tail is its new tokens: the draft tree or chain after the prefix.

    Attributes:
        prefix: number of committed tokens, L.
        pages: page ids in the order of the request's positions; token n lives in ``pages[n // P]`` at ``n % P``.
        parents: parent of each tail slot (new token), or `NO_PARENT`. Parents come before children.
        rows: number of query rows; row j is tail slot ``len(parents) - rows + j``.
        live: False for a padded request.
        masks: tail slots that each tail slot sees, itself included; () if each sees itself and its ancestors.
        returned: pages at the start, left of the window, that the request has given back; its KV there is lost.
        leaf: last accepted tail slot of a verify of recurrent state, or `NO_PARENT` if none is accepted.
        save: state slot that a checkpoint of this round goes to; 0, the null slot, if none is lent.
    """

    prefix: int
    pages: tuple[int, ...]
    parents: tuple[int, ...]
    rows: int
    live: bool = True
    masks: tuple[tuple[int, ...], ...] = ()
    returned: int = 0
    leaf: int = NO_PARENT
    save: int = 0

    @property
    def tail(self) -> int:
        """Number of tail slots (new tokens), T."""
        return len(self.parents)

    def lineage(self, slot: int) -> list[int]:
        """Return a tail slot (new token) and its ancestors, newest first."""
        line = []
        while slot != NO_PARENT:
            line.append(slot)
            slot = self.parents[slot]
        return line

    def seen(self, slot: int) -> list[int]:
        """Return the tail slots that one tail slot sees: itself and its ancestors, or the slots of its mask."""
        return list(self.masks[slot]) if self.masks else self.lineage(slot)

    def depth(self, slot: int) -> int:
        """Return the number of ancestors of a tail slot (new token) in the tail. The slot's position is L + depth."""
        return self._depths[slot]

    @cached_property
    def _depths(self) -> tuple[int, ...]:
        """Depth of every tail slot (new token). Cached, because following the parents per row is quadratic."""
        found: list[int] = []
        for parent in self.parents:
            found.append(0 if parent == NO_PARENT else found[parent] + 1)
        return tuple(found)

    def own_slot(self, row: int) -> int:
        """Return the tail slot (new token) that a query row belongs to."""
        return self.tail - self.rows + row

    def __str__(self) -> str:
        kind = "" if self.live else "padding "
        chain = all(parent == i - 1 for i, parent in enumerate(self.parents))
        tree = "chain" if chain else f"parents {list(self.parents)}"
        tree += f" masks {[list(one) for one in self.masks]}" if self.masks else ""
        left = f" returned={self.returned}" if self.returned else ""
        left += f" accepted={self.lineage(self.leaf)[::-1]}" if self.leaf != NO_PARENT else ""
        left += f" save={self.save}" if self.save else ""
        return f"{kind}L={self.prefix} rows={self.rows} tail={self.tail} {tree} pages={_short(self.pages)}{left}"


def chain(length: int) -> tuple[int, ...]:
    """Return the parents of a chain of `length` new tokens (tail slots)."""
    return tuple(range(-1, length - 1))


def kv_slots(request: Request, page_size: int) -> list[int]:
    """Return the KV slot of every token of the request, prefix first, by walking its pages."""
    slots: list[int] = []
    for page in request.pages:
        for offset in range(page_size):
            slots.append(page * page_size + offset)
    return slots[: request.prefix + request.tail]


def filled_slots(request: Request, page_size: int) -> list[int]:
    """Return the KV slots that are filled before a forward: committed tokens, and new tokens of earlier draft steps.

    Slots in pages that the request has given back are not its own any more.
    """
    return kv_slots(request, page_size)[request.returned * page_size : -request.rows or None]


def _short(pages: tuple[int, ...]) -> str:
    shown = ", ".join(map(str, pages[:6]))
    return f"[{shown}{', …' if len(pages) > 6 else ''}]"
