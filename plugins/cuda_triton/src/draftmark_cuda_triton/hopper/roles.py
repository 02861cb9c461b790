"""Who is who in a program: its folding groups, the warps that fetch K and V, and the group that widens or gathers both.

A role is a function of what it is given, of which one of its kind it is, and of the kernel's constants.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .fetch import (
    CROWDED_REGISTERS,
    FETCH_REGISTERS,
    GATHERED,
    KEYS,
    LONE_REGISTERS,
    VALUES,
    WIDEN_REGISTERS,
    WIDENED,
)
from .gather import CROWDED_REGISTERS as CROWDED_GATHER_REGISTERS
from .gather import GATHER_REGISTERS, GATHERERS


@gluon.jit
def play(ROLE: gl.constexpr, given, WHICH: gl.constexpr, C: gl.constexpr):
    """A role, as `warp_specialize` can be given one: it takes no function that has a name of its own there."""
    ROLE(given, WHICH, C)


@gluon.jit
def start(
    FOLD: gl.constexpr, fold, BRING: gl.constexpr, bring, C: gl.constexpr, WIDEN: gl.constexpr, REGISTERS: gl.constexpr
):
    """Start the roles of a program whose keys come in boxes; it ends when all have."""
    # More would leave too few registers to a group that folds rows of 256.
    WIDENERS: gl.constexpr = 8 if C.BLOCK_D < 256 else 4
    if C.MEMBERS == 1 and not WIDEN:
        gl.warp_specialize(
            [(play, (FOLD, fold, 0, C)), (play, (BRING, bring, KEYS, C)), (play, (BRING, bring, VALUES, C))],
            [1, 1], [LONE_REGISTERS, LONE_REGISTERS],
        )  # fmt: skip
    elif C.MEMBERS == 1:
        gl.warp_specialize(
            [
                (play, (FOLD, fold, 0, C)),
                (play, (BRING, bring, KEYS, C)),
                (play, (BRING, bring, VALUES, C)),
                (play, (BRING, bring, WIDENED, C)),
            ],
            [1, 1, WIDENERS], [FETCH_REGISTERS, FETCH_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip
    elif C.MEMBERS == 3:
        gl.warp_specialize(
            [
                (play, (FOLD, fold, 0, C)),
                (play, (FOLD, fold, 1, C)),
                (play, (FOLD, fold, 2, C)),
                (play, (BRING, bring, KEYS, C)),
                (play, (BRING, bring, VALUES, C)),
            ],
            [4, 4, 1, 1], [REGISTERS, REGISTERS, CROWDED_REGISTERS, CROWDED_REGISTERS],
        )  # fmt: skip
    elif not WIDEN:
        gl.warp_specialize(
            [
                (play, (FOLD, fold, 0, C)),
                (play, (FOLD, fold, 1, C)),
                (play, (BRING, bring, KEYS, C)),
                (play, (BRING, bring, VALUES, C)),
            ],
            [4, 1, 1], [REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (play, (FOLD, fold, 0, C)),
                (play, (FOLD, fold, 1, C)),
                (play, (BRING, bring, KEYS, C)),
                (play, (BRING, bring, VALUES, C)),
                (play, (BRING, bring, WIDENED, C)),
            ],
            [4, 1, 1, 4], [REGISTERS, FETCH_REGISTERS, FETCH_REGISTERS, WIDEN_REGISTERS],
        )  # fmt: skip


@gluon.jit
def start_gathering(
    FOLD: gl.constexpr, fold, BRING: gl.constexpr, bring, C: gl.constexpr, REGISTERS: gl.constexpr
):  # fmt: skip
    """Start the roles of a program whose keys are gathered."""
    if C.MEMBERS == 1:
        gl.warp_specialize(
            [(play, (FOLD, fold, 0, C)), (play, (BRING, bring, GATHERED, C))], [GATHERERS], [GATHER_REGISTERS]
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(play, (FOLD, fold, 0, C)), (play, (FOLD, fold, 1, C)), (play, (BRING, bring, GATHERED, C))],
            [4, GATHERERS], [REGISTERS, CROWDED_GATHER_REGISTERS],
        )  # fmt: skip
