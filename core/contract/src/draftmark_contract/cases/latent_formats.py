"""Latent rows of 656 bytes (`FP8_DS_MLA`): layers, lists, sizes and graphs. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark.geometry import (
    CORE_MODES,
    FP8_DS_MLA,
    AttentionShape,
    Form,
    Geometry,
    Limits,
    Mode,
)

from ..check import Case
from ..production_sizes import KEYS, REQUESTS
from .chosen import listed
from .drawn import Sizes
from .features import FULL_KEYS, FULL_REQUESTS
from .forward_sets import last_steps
from .forwards import of_mode
from .geometries import Shape
from .graph_rounds import captured, programs_of, replays, sizes_of
from .latent import LIMITS, MODES, SINCE, forwards_of, geometry_of, rows_of

FP8: dict[str, Any] = {"kv_dtype": "float8_e4m3fn", "row_format": FP8_DS_MLA}
STORED = (Form.ENGINE_STORES,)
"""Form of every layer: only the engine writes rows of 656 bytes."""
ATTENTIONS = {
    "h16-page64": (rows_of(16, 64, **FP8), STORED),
    "h5-page1": (rows_of(5, 1, **FP8), STORED),
    "h12-page48": (rows_of(12, 48, **FP8), (*STORED, Form.STRIDED_KV, Form.ENGINE_TABLE)),
    "h8-page16-all": (rows_of(8, 16, window_left=60, logits_soft_cap=30.0, sinks=True, **FP8), STORED),
}
"""Layers and their forms; the last one has a window, a cap and sinks."""
LISTED = {
    "w48-h16-page64": (listed(48, 16, 64, **FP8), STORED),
    "w130-h5-page1": (listed(130, 5, 1, **FP8), STORED),
    "w33-h12-page16": (listed(33, 12, 16, **FP8), (*STORED, Form.STRIDED_KV)),
}
"""Layers with chosen keys, and their forms."""


def _each_mode(layers: dict[str, tuple[AttentionShape, tuple[Form, ...]]], *names: str) -> list[Case]:
    found = []
    for name, (attention, forms) in layers.items():
        for label in MODES if not names or name in names else ():
            geometry = geometry_of(attention, MODES[label], forms)
            found.append(Shape(name, geometry, SINCE).case(forwards_of(geometry), label))
    return found


def each_mode() -> list[Case]:
    """Return the forwards of each set of modes, for every layer."""
    return _each_mode(ATTENTIONS)


def some_modes() -> list[Case]:
    """Return the forwards of each set of modes for two layers."""
    return _each_mode(ATTENTIONS, "h16-page64", "h12-page48")


def lists() -> list[Case]:
    """Return two forwards of every mode with other lists, for layers with chosen keys."""
    return [
        replace(case, value=[replace(one, draw=draw) for one in case.value for draw in (0, 1)])
        for case in _each_mode(LISTED)
    ]


def crowds() -> list[Case]:
    """Return a crowd with over 2,048 keys in every mode."""
    found = []
    for number, mode in enumerate(Mode):
        heads, page = ((4, 16), (8, 128), (5, 16))[number % 3]
        slug = f"h{heads}-page{page}-{mode.value}".replace("_", "-")
        sizes = Sizes(rows_of(heads, page, **FP8), mode, REQUESTS, KEYS + 33, forms=STORED)
        found.append(Case(slug, sizes.draw(slug), SINCE))
    return found


def graphs() -> list[Case]:
    """Return the batches of each program: those on which graphs are captured, largest first, then the replayed ones."""
    limits = replace(LIMITS, max_context_len=420, capture_batch_sizes=(1, 3, 6), row_budgets=(4, 16))
    found = []
    layers = {**ATTENTIONS, **LISTED}
    for name, sets in {"h16-page64": ("core", "ragged"), "w33-h12-page16": ("core",)}.items():
        for label in sets:
            geometry = geometry_of(layers[name][0], MODES[label], layers[name][1], limits)
            for program in programs_of(geometry):
                sizes = sorted(sizes_of(geometry, program), reverse=True)
                first = [captured(geometry, program, size, short=size == sizes[0]) for size in sizes]
                every = replays(geometry, program)
                rounds = [*first, *(every[which][1] for which in (0, 2, 3))]
                found.append(Shape(name, geometry, SINCE).case(rounds, program.value))
    return found


def far() -> list[Case]:
    """Return forwards on pages after which byte offsets of rows do not fit 32 bits: slots from 3.2 million on."""
    attention, forms = ATTENTIONS["h16-page64"]
    geometry = geometry_of(attention, CORE_MODES, forms)
    first, last = 2**31 // (attention.page_size * 656) + 3, last_steps(geometry)
    made = [
        of_mode(mode.value, geometry, mode, (70, 17), (3, 4), 3, step=last[mode], first_page=first)
        for mode in (Mode.EXTEND, Mode.VERIFY)
    ]
    return [Case(one.name, one, SINCE) for one in made]


def full_size() -> list[Case]:
    """Return forwards of 33 requests of up to 8,192 keys, and with lists of 2,048, for a device."""
    found = []
    layers = {
        "128": rows_of(128, 64, **FP8),
        "16": rows_of(16, 64, **FP8),
        "128-lists": listed(2048, 128, 64, **FP8),
        "16-lists": listed(2048, 16, 64, **FP8),
    }
    for name, attention in layers.items():
        for mode in (Mode.DECODE, Mode.EXTEND, Mode.VERIFY, Mode.RAGGED_VERIFY):
            slug = f"full-{name}-{mode.value}".replace("_", "-")
            sizes = Sizes(attention, mode, FULL_REQUESTS, FULL_KEYS, forms=STORED)
            found.append(Case(slug, sizes.draw(slug), SINCE))
    return found


def claims() -> list[Case]:
    """Return a small geometry with rows of 656 bytes, and one with chosen keys too."""
    limits, modes = Limits(3, 300, 40, (4,)), (Mode.EXTEND, Mode.DECODE)
    layers = {"rows": ATTENTIONS["h16-page64"], "lists": LISTED["w48-h16-page64"]}
    return [
        Case(name, Geometry.create(attention, limits, modes=modes, forms=forms), SINCE)
        for name, (attention, forms) in layers.items()
    ]
