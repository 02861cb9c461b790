"""Random sequences of rounds over recurrent state, and long runs of one request. No torch."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import DraftShape, Gate, Limits, Mode, Recurrence

from ..check import Case
from . import state
from .state import CHAIN, LAYERS, LIMITS, SINCE, TREE, geometry_of

TOKENS, ROWS = 10_000, 16
"""Tokens of a long run, and rows of its rounds."""
LONG = Limits(1, TOKENS + 64, 64, (1,))
MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)


def histories() -> list[Case]:
    """Return geometries for random sequences: each layer with chains and trees, some with checkpoints."""
    found = []
    for number, name in enumerate(LAYERS):
        for label, draft in (("chain", CHAIN), ("tree", TREE)):
            interval = 7 if (number + (label == "tree")) % 2 else 0
            geometry = geometry_of(name, draft, replace(LIMITS, state_interval=interval, max_context_len=150))
            found.append(Case(f"{name}-{label}", (geometry, number), SINCE))
    return found


def drifts() -> list[Case]:
    """Return small layers of one head with the dtypes of models that keep their state for thousands of tokens."""
    shapes = {
        "delta": state.recurrent(Recurrence.DELTA, Gate.HEAD, (1, 1), 8, 16),
        "decay": state.recurrent(Recurrence.DECAY, Gate.HEAD, (1, 1), 8, 16, **state.NO_CONVOLUTION),
    }
    draft = DraftShape(1, ROWS - 1, ROWS)
    return [Case(name, geometry_of(one, draft, LONG, modes=MODES, layers=1), SINCE) for name, one in shapes.items()]
