"""Represents a batch as integers for `usage()`: the host side of a `ForwardBatch`, without tensors and torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from draftmark.geometry import Geometry, Mode

from ..check import ContractViolation
from ..roles import USAGE_ROLES, Buffer
from .batches import BatchShape, brief

if TYPE_CHECKING:
    from draftmark.runtime import ForwardBatch

    from ..backend_under_test import BackendUnderTest


@dataclass(frozen=True)
class PlainLengths:
    """Holds exact host lengths, with the interface of `HostLengths`."""

    lens: tuple[int, ...]

    def upper_bound(self) -> tuple[int, ...]:
        """Return the exact lengths, which are also the tightest upper bounds."""
        return self.lens


class PlainBatch:
    """Holds what `usage(geometry, batch)` is allowed to read of a batch: mode, step, lengths and counts, no tensors."""

    def __init__(self, shape: BatchShape) -> None:
        self.mode, self.step = shape.mode, shape.step
        each = [group for group in shape.groups for _ in range(group.count)]
        self.q_lens = tuple(group.rows for group in each)
        self.tail_lens = tuple(group.tail for group in each)
        self.host = PlainLengths(tuple(group.prefix for group in each))
        self.num_reqs = self.padded_reqs = len(each)
        self.num_rows = sum(self.q_lens)

    @property
    def uniform(self) -> bool:
        """True if all requests have equal rows and tail slots, as in `ForwardBatch`."""
        return self.mode not in (Mode.EXTEND, Mode.RAGGED_VERIFY)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"usage() may read host numbers only; {name} is on the device or does not exist")


def judged_own_buffers(subject: BackendUnderTest, specs: list[Buffer]) -> list[Buffer]:
    """Return the buffers that only `usage()` can size. Without `usage()` return [] and mark the item as not judged."""
    own = [spec for spec in specs if spec.role in USAGE_ROLES]
    if own and not subject.notes.has_usage:
        subject.opaque()
        return []
    return own


def usage_of(subject: BackendUnderTest, geometry: Geometry, shape: BatchShape, specs: list[Buffer]) -> dict[str, int]:
    """Return `usage()` of one batch in bytes, by buffer. Check that it covers exactly the plugin-sized buffers."""
    used = subject.notes.usage(geometry, cast("ForwardBatch", PlainBatch(shape)))
    known = {spec.name for spec in specs if spec.role in USAGE_ROLES}
    wrong = {name: size for name, size in used.items() if not isinstance(size, int) or size < 0}
    if set(used) == known and not wrong:
        return used
    raise ContractViolation(
        "usage() must return bytes (int >= 0) for each buffer of the plugin's own roles, and for no other buffer",
        batch=f"{brief(geometry)}; {shape}",
        got=used,
        expected=sorted(known),
        formula="usage(geometry, batch) of the plugin's contract notes",
        bug="TRT-LLM#17026",
        remedy="return a size for every workspace, split_schedule, partial and host_staging buffer of buffers()",
    )
