"""Checks that read the device, for an engine under development: ``DRAFTMARK_GUARD=1``.

`draftmark.guard` finds this package by its name. The core has the checks of shapes, types and host numbers.
"""

from .arena import GuardedArena
from .backend import GuardedBackend
from .state import GuardedState
from .tree_ops import GuardedTreeOps
from .values import (
    check_accept_index,
    check_advance,
    check_parent_values,
    check_positions,
    check_slots,
    check_targets,
)

__all__ = [
    "GuardedArena",
    "GuardedBackend",
    "GuardedState",
    "GuardedTreeOps",
    "check_accept_index",
    "check_advance",
    "check_parent_values",
    "check_positions",
    "check_slots",
    "check_targets",
]
