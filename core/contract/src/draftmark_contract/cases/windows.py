"""Forwards of window layers after engines gave back the pages left of the window. Does not import torch."""

from __future__ import annotations

from dataclasses import replace

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from .forward_sets import last_steps
from .forwards import ForwardCase, of_mode
from .geometries import PAGE128, SMALL, Shape
from .graph_rounds import MODES, programs_of

SINCE = (1, 5)
LIMITS = Limits(
    max_num_reqs=4, max_context_len=400, max_extend_tokens=48, capture_batch_sizes=(1, 5), row_budgets=(16,)
)
TREE = DraftShape(topk=2, num_steps=3, num_draft_tokens=5)
CHAIN = DraftShape(topk=1, num_steps=3, num_draft_tokens=4)
"""Chains, because some kernels support windows with chains only."""
BLOCK = DraftShape(topk=1, num_steps=1, num_draft_tokens=3, block_size=7)
HOLDS = ("nan", "null", "written", "mixed")
"""Kinds of pages that a column left of the window names; see `ForwardCase.with_returned_pages`."""
LENS = ((391, 130, 0, 260), (150, 391), (64, 300, 129))
"""Prefix lengths: some far longer than every window, some on both sides of a page boundary, one empty."""
ROWS = (5, 3, 1, 4)
"""New tokens of each request, where they may differ."""


def _attentions() -> dict[str, AttentionShape]:
    half = replace(SMALL, q_dtype="float16", kv_dtype="float16")
    return {
        "page16": replace(half, window_left=21),
        "page8-cap": replace(half, page_size=8, window_left=5, logits_soft_cap=30.0),
        "page1-window0": replace(half, page_size=1, window_left=0),
        "page48-fp32": replace(SMALL, page_size=48, window_left=50, q_dtype="float32", kv_dtype="float32"),
        "page128": replace(PAGE128, window_left=127),
        "page32-kv8": replace(SMALL, page_size=32, window_left=60, kv_dtype="float8_e4m3fn"),
        "page16-sinks": AttentionShape(8, 1, 64, 16, window_left=127, sinks=True),
    }


def _shapes(*names: str) -> list[Shape]:
    """Return geometries with the core modes, and one geometry for each other mode, which a backend may not serve."""
    sets = {"": (CORE_MODES, TREE), "ragged_verify": ((Mode.EXTEND, Mode.RAGGED_VERIFY), TREE)}
    sets["chain"] = CORE_MODES, CHAIN
    sets["draft_block"] = (Mode.EXTEND, Mode.DRAFT_BLOCK), BLOCK
    found = []
    for name, attention in _attentions().items():
        for more, (modes, draft) in sets.items():
            label = f"{name}-{more}" if more else name
            if not names or name in names:
                found.append(Shape(label, Geometry.create(attention, LIMITS, draft, modes=modes), SINCE))
    return found


def eager() -> list[Case]:
    """Return forwards of one geometry in each of its modes, each with other contents left of the window."""
    found = []
    for number, shape in enumerate(_shapes()):
        last = last_steps(shape.geometry)
        forwards = [_forward(shape.geometry, mode, step, number + n) for n, (mode, step) in enumerate(last.items())]
        found.append(shape.case(forwards))
    return found


def _forward(geometry: Geometry, mode: Mode, step: int, seed: int) -> ForwardCase:
    lens, holds = LENS[seed % len(LENS)], HOLDS[seed % len(HOLDS)]
    rows = ROWS[: len(lens)]
    made = of_mode(mode.value, geometry, mode, lens, rows, len(lens) + 1, step=step, seed=seed)
    return made.with_returned_pages(holds, seed)


def replayed() -> list[Case]:
    """Return lists of batches of one program: the first is captured, the others have each kind of foreign pages."""
    found = []
    for shape in _shapes("page16", "page128"):
        for program in programs_of(shape.geometry):
            mode, size = MODES[program], shape.geometry.limits.capture_batch_sizes[-1]
            step = last_steps(shape.geometry)[mode]
            rounds = [of_mode("captured", shape.geometry, mode, (1,), (1,), size, step=step)]
            for n, holds in enumerate(HOLDS):
                lens = LENS[n % len(LENS)]
                made = of_mode(f"replay-{n}", shape.geometry, mode, lens, ROWS[: len(lens)], size, step=step, seed=n)
                rounds.append(made.with_returned_pages(holds, n))
            found.append(shape.case(rounds, program.value))
    return found
