"""Forwards of every mode and form, for a process without the suite and for unusual memory and threads. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftmark.geometry import LAYOUT_FORMS, Form, Geometry, Mode

from ..check import Case
from ..profiles import MANDATORY
from .engine_forwards import LONG, in_mode
from .forward_sets import last_steps
from .forwards import ForwardCase, ragged, uniform
from .geometries import TREE, shapes

SINCE = (1, 5)
Groups = tuple[tuple[ForwardCase, ...], ...]
"""Lists of forwards, each of one geometry. A backend runs the lists that it serves."""
NAMES = ("small", "all-modes")
OUTSIDE = (Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)
"""Modes that no geometry of `shapes` has."""


def groups() -> list[Case]:
    """Return forwards of EXTEND and DECODE, of the core modes, and of every other mode and form in the core's shape."""
    known = [shape.case((one_of_each_mode(shape.geometry),)) for shape in shapes("all-modes") if shape.name in NAMES]
    plain = [_group((mode,)) for mode in OUTSIDE]
    forms = [_group((Mode.DECODE,), one) for one in LAYOUT_FORMS]
    together = [_group((mode,), *LAYOUT_FORMS) for mode in (Mode.VERIFY, *OUTSIDE)]
    return [*known, Case("outside", (*plain, *forms, *together), SINCE)]


def one_of_each_mode(geometry: Geometry) -> tuple[ForwardCase, ...]:
    """Return one forward of every core mode, in the size of a captured graph."""
    size = geometry.limits.capture_batch_sizes[-1] if len(geometry.limits.capture_batch_sizes) < 3 else 4
    found = [ragged("extend", geometry, (17, 0), (3, 5), padded=1)]
    for mode, step in last_steps(geometry).items():
        if mode is not Mode.EXTEND:
            found.append(uniform(mode.value, geometry, mode, (17, 3), size, step=step))
    return tuple(found)


def _group(modes: Sequence[Mode], *forms: Form) -> tuple[ForwardCase, ...]:
    """Return a forward of EXTEND and of each of these modes in one geometry with these forms."""
    served = (Mode.EXTEND, *modes)
    geometry = Geometry.create(MANDATORY, LONG, replace(TREE, block_size=4), modes=served, forms=forms)
    return tuple(in_mode(geometry, mode) for mode in served)
