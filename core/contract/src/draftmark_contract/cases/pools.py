"""Forwards on pages far into a KV pool of several layers, in which all layers of a page are adjacent. No torch."""

from __future__ import annotations

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from .forward_sets import last_steps
from .forwards import of_mode
from .geometries import Shape

SINCE = (1, 5)
LIMITS = Limits(max_num_reqs=3, max_context_len=200, max_extend_tokens=32, capture_batch_sizes=(1, 4), row_budgets=(8,))
TREE = DraftShape(topk=2, num_steps=3, num_draft_tokens=4, block_size=5)
OFFSET, LAYERS = 2**31, 3
"""Element offset that does not fit 32 bits, and layers of the pool."""
MODES = (*CORE_MODES, Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)


def far() -> list[Case]:
    """Return one forward of each mode. The first page is one after which element offsets do not fit 32 bits."""
    shapes = {
        "page16": AttentionShape(8, 2, 128, 16),
        "page128": AttentionShape(4, 2, 128, 128, "float16", "float16"),
    }
    found = []
    for name, shape in shapes.items():
        first = OFFSET // (2 * LAYERS * shape.page_size * shape.num_kv_heads * shape.head_dim) + 3
        for mode in MODES:
            served = tuple(dict.fromkeys((Mode.EXTEND, mode)))
            geometry = Geometry.create(shape, LIMITS, TREE, modes=served, forms=(Form.STRIDED_KV,))
            step = last_steps(geometry)[mode]
            forward = of_mode(mode.value, geometry, mode, (150, 17, 0), (3, 4, 1), 4, step=step, first_page=first)
            found.append(Shape(name, geometry, SINCE).case(forward, mode.value))
    return found
