"""The batch and the buffers that the page shows: small enough to draw, with everything that hides bugs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draftmark.geometry import DRAFT_MODES, TARGET_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ...check import Refused
from ...checks.tightness import largest_need
from ...sizing.batches import limit_batches
from ...sizing.usage import judged_own_buffers, usage_of

if TYPE_CHECKING:
    from ...backend_under_test import BackendUnderTest

PLAIN = (Mode.EXTEND, Mode.DECODE)
PARENTS = (-1, 0, 0, 0, 1, 1, 2, 4)
"""A tree of D = 8 rows, k = 3: row j's parent; the root has none."""
PREFIXES = (37, 90, 0)
"""Committed lengths of two live requests and of a padded one."""


@dataclass(frozen=True)
class BufferRow:
    """One line of the buffer table; counts in the buffer's own entries."""

    name: str
    role: str
    shape: str
    dtype: str
    formula: str
    declared: int
    needed: int
    nbytes: int

    @property
    def slack(self) -> float:
        """Declared above needed, as a share of what is needed."""
        return self.declared / self.needed - 1 if self.needed else 0.0


def sample_geometry(subject: BackendUnderTest) -> Geometry | None:
    """The first of a target, a draft and a mandatory geometry of production size that the backend serves."""
    for modes, draft in (
        (TARGET_MODES, DraftShape(3, 4, 8)),
        (DRAFT_MODES, DraftShape(3, 4, 8)),
        (PLAIN, DraftShape()),
    ):
        for page in (16, 64, 128):
            geometry = Geometry.create(
                AttentionShape(8, 2, 128, page), Limits(64, 32768, 8192, (8, 16, 64)), draft, modes=modes
            )
            try:
                subject.require(geometry)
            except Refused:
                continue
            return subject.fit(geometry)
    return None


def buffer_rows(subject: BackendUnderTest, geometry: Geometry) -> Sequence[BufferRow]:
    """Every buffer of the backend at this geometry, with the largest need of any batch."""
    specs = subject.backend.buffers(geometry)
    metadata = subject.layouts(geometry)
    own = judged_own_buffers(subject, specs)
    usages = [usage_of(subject, geometry, batch, specs) for batch in limit_batches(geometry)] if own else []
    rows = []
    for spec in specs:
        declared, needed = spec.numel, largest_need(spec, geometry, metadata)[0]
        if spec in own:
            declared, needed = spec.nbytes, max(used[spec.name] for used in usages)
        shape = " x ".join(map(str, spec.shape))
        rows.append(
            BufferRow(spec.name, spec.role.value, shape, spec.dtype, spec.formula, declared, needed, spec.nbytes)
        )
    return rows


def depth(row: int) -> int:
    """Steps from the root."""
    return 0 if PARENTS[row] < 0 else 1 + depth(PARENTS[row])


def sees(row: int, slot: int) -> bool:
    """Whether a tree row sees a tail slot: itself and its ancestors."""
    while row >= 0:
        if row == slot:
            return True
        row = PARENTS[row]
    return False
