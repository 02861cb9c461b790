"""Forwards of forked requests: several requests read the same prefix pages. Drawn from a seed; no torch."""

from __future__ import annotations

import random
from dataclasses import replace

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from .forward_sets import last_steps
from .forwards import ForwardCase, of_mode
from .geometries import PAGE128, SMALL, Shape
from .graph_rounds import MODES, programs_of

SINCE = (1, 5)
LIMITS = Limits(
    max_num_reqs=6, max_context_len=300, max_extend_tokens=48, capture_batch_sizes=(1, 7), row_budgets=(24,)
)
TREE = DraftShape(topk=2, num_steps=3, num_draft_tokens=4)
BLOCK = DraftShape(topk=1, num_steps=1, num_draft_tokens=3, block_size=5)
DRAWN = 3
"""Forwards of one mode and shape."""


def _attentions() -> dict[str, AttentionShape]:
    half = replace(SMALL, q_dtype="float16", kv_dtype="float16")
    return {
        "page16": half,
        "page1-gqa8": AttentionShape(8, 1, 64, 1),
        "page8-window": replace(half, page_size=8, window_left=37, logits_soft_cap=30.0),
        "page128": PAGE128,
        "page32-kv8": replace(SMALL, page_size=32, kv_dtype="float8_e4m3fn"),
    }


def _shapes(*names: str) -> list[Shape]:
    """Return geometries with the core modes, and one geometry for each other mode, which a backend may not serve."""
    sets = {
        "": (CORE_MODES, TREE),
        "ragged_verify": ((Mode.EXTEND, Mode.RAGGED_VERIFY), TREE),
        "draft_block": ((Mode.EXTEND, Mode.DRAFT_BLOCK), BLOCK),
    }
    return [
        Shape(f"{name}-{more}" if more else name, Geometry.create(attention, LIMITS, draft, modes=modes), SINCE)
        for name, attention in _attentions().items()
        for more, (modes, draft) in sets.items()
        if not names or name in names
    ]


def eager() -> list[Case]:
    """Return lists of forwards of one shape and mode, each with other forks, after a forward without forks."""
    return [
        shape.case([drawn(shape.geometry, mode, step, seed) for seed in range(DRAWN)], mode.value)
        for shape in _shapes()
        for mode, step in last_steps(shape.geometry).items()
    ]


def replayed() -> list[Case]:
    """Return lists of batches of one program. The first is captured: of one request, or of forks."""
    found = []
    for shape in _shapes("page16", "page128"):
        geometry, size = shape.geometry, shape.geometry.limits.capture_batch_sizes[-1]
        for program in programs_of(geometry):
            mode, step = MODES[program], last_steps(geometry)[MODES[program]]
            later = [drawn(geometry, mode, step, seed, size) for seed in range(DRAWN)]
            short = of_mode("captured", geometry, mode, (1,), (1,), size, step=step)
            found.append(shape.case([short, *later], program.value))
            found.append(shape.case([later[0], *later[::-1]], f"{program.value}-of-forks"))
    return found


def drawn(geometry: Geometry, mode: Mode, step: int, seed: int, padded: int = 0) -> ForwardCase:
    """Return a forward of up to six requests in groups of forks; seed 0 has three forks of equal length.

    Forks of a group have equal lengths, or lengths that differ by up to two pages. Some forks were forked again.
    Lengths end within a page or at its end, or before the first page's end, where nothing is shared.
    """
    dice = random.Random(f"forks {geometry.attention} {mode} {seed}")
    size, most = geometry.attention.page_size, geometry.limits.max_num_reqs
    live = most if seed else 3
    order = dice.sample(range(live), live)
    cut = dice.randrange(2, live - 1) if seed else live
    groups = [group for group in (order[:cut], order[cut:]) if len(group) > 1]
    lens = [dice.randrange(1, 60) for _ in range(live)]
    longest = geometry.limits.max_context_len
    for number, group in enumerate(groups):
        base = min(longest, dice.choice((1, 2, 3)) * max(size, 13) + dice.choice((0, 0, 1, size - 1)))
        for one in group:
            apart = dice.choice((0, 0, size, 2 * size, 1)) if seed > 1 or number else 0
            lens[one] = min(longest, base + apart)
    rows = [dice.randrange(1, 6 if mode is Mode.EXTEND else geometry.draft.num_draft_tokens + 1) for _ in range(live)]
    made = of_mode(f"forks-{seed}", geometry, mode, lens, rows, padded or live + seed % 2, step=step, seed=seed)
    forked = made.forked(groups)
    # A fork of a fork: the last request of a group is forked from the one before it, and also reads its pages.
    return forked.forked([group[-2:] for group in groups]) if seed % 2 else forked
