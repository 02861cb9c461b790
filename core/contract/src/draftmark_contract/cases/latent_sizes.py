"""Latent rows and narrow values at production size, and together with the features of other profiles. No torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from draftmark.geometry import LAYOUT_FORMS, AttentionShape, Form, Mode

from ..check import Case
from ..production_sizes import KEYS, REQUESTS
from .drawn import Sizes
from .features import FULL_KEYS, FULL_REQUESTS, PROMPT
from .latent import HALF, PARTS, SINCE, rows_of
from .space import covering

STORED = (*LAYOUT_FORMS, Form.ENGINE_STORES)
LATENT = {
    Mode.DECODE: ((128, 64), (64, 16), (32, 128)),
    Mode.EXTEND: ((8, 16),),
    Mode.VERIFY: ((16, 64),),
    Mode.DRAFT: ((12, 1),),
    Mode.DRAFT_EXTEND: ((16, 32),),
    Mode.RAGGED_VERIFY: ((8, 16),),
    Mode.DRAFT_BLOCK: ((8, 64),),
}
"""Query heads and page size of each production forward of the latent profile, by mode."""
SHAPES = {
    Mode.DECODE: (96, 48, 512, 512),
    Mode.EXTEND: (5, 5, 160, 128),
    Mode.VERIFY: (20, 100, 320, 256),
    Mode.DRAFT: (1, 256, 160, 128),
    Mode.DRAFT_EXTEND: (6, 2, 160, 128),
    Mode.RAGGED_VERIFY: (5, 8, 320, 256),
    Mode.DRAFT_BLOCK: (20, 48, 160, 128),
}
"""Query heads, page size, row and value width of each production forward of other latent shapes, by mode."""
NARROW = ((8, 2), (2, 2), (6, 1), (16, 2), (8, 1), (12, 4), (9, 1))
"""Query and KV heads of each production forward with narrow values, in the order of the modes."""


def _drawn(name: str, sizes: Sizes) -> Case:
    slug = f"{name}-{sizes.mode.value}-h{sizes.attention.num_qo_heads}-page{sizes.attention.page_size}"
    slug = slug.replace("_", "-")
    return Case(slug, sizes.draw(slug), SINCE)


def _narrow(number: int, heads: tuple[int, int]) -> AttentionShape:
    width, value = ((192, 128), (192, 128), (80, 64))[number % 3]
    return AttentionShape(*heads, width, (16, 128, 64)[number % 3], value_dim=value)


def crowds() -> list[Case]:
    """Return a crowd with over 2,048 keys in every mode for each profile of latent rows."""
    found = []
    for mode in Mode:
        for heads, page in LATENT[mode]:
            found.append(_drawn("latent", Sizes(rows_of(heads, page), mode, REQUESTS, KEYS + 60)))
        found.append(_drawn("shapes", Sizes(rows_of(*SHAPES[mode]), mode, REQUESTS, KEYS + 9)))
        parts = rows_of(4, 16) if mode is Mode.DECODE else rows_of(4, 128, 160, 128)
        found.append(_drawn("parts", Sizes(parts, mode, REQUESTS, KEYS, forms=PARTS)))
    # A prompt of many rows, in a prefill of few requests.
    found.append(_drawn("prompt", Sizes(rows_of(8, 64), Mode.EXTEND, 2, PROMPT // 2, prompt=PROMPT // 2)))
    return [*found, _drawn("prompt", Sizes(rows_of(2, 16, 160, 128), Mode.EXTEND, 2, PROMPT, prompt=PROMPT))]


def narrow_crowds() -> list[Case]:
    """Return a crowd with over 2,048 keys in every mode for values that are narrower than keys."""
    found = [
        _drawn("narrow", Sizes(_narrow(number, NARROW[number]), mode, REQUESTS, KEYS + 33))
        for number, mode in enumerate(Mode)
    ]
    return [*found, _drawn("prompt", Sizes(_narrow(0, (2, 1)), Mode.EXTEND, 2, PROMPT, prompt=PROMPT))]


def together() -> list[Case]:
    """Return forwards in which latent rows meet wide tails, overlap and each form of an engine, in every mode."""
    axes: dict[str, Sequence[Any]] = {
        "mode": tuple(Mode),
        "overlap": (False, True),
        "wide": (False, True),
        "forms": (*((form,) for form in STORED), STORED, ()),
        "rows": (rows_of(8, 16), rows_of(16, 64, **HALF), rows_of(20, 48, 320, 256), "parts"),
    }
    found = []
    points: Sequence[dict[str, Any]] = covering(axes, random.Random("latent"))
    for n, point in enumerate(points):
        parts, mode = point["rows"] == "parts", point["mode"]
        attention, forms = (rows_of(8, 128), (*point["forms"], *PARTS)) if parts else (point["rows"], point["forms"])
        sizes = Sizes(attention, mode, 6, 400, wide=point["wide"], overlap=point["overlap"], forms=forms)
        slug = f"joined-{mode.value}-{n}".replace("_", "-")
        found.append(Case(slug, sizes.draw(slug), SINCE))
    return found


def full_size() -> list[Case]:
    """Return forwards of 33 requests with up to 8,192 keys in the head counts of models, for a device."""
    found = []
    shapes = {
        "128": rows_of(128, 64),
        "16": rows_of(16, 16),
        "64-page1": rows_of(64, 1),
        "20": rows_of(20, 64),
        "256": rows_of(32, 48, 320, 256),
        "512": rows_of(8, 64, 512, 512),
    }
    for name, attention in shapes.items():
        for mode in Mode:
            found.append(_drawn(f"full-{name}", Sizes(attention, mode, FULL_REQUESTS, FULL_KEYS)))
    wide = replace(rows_of(128, 64), **HALF)
    return [*found, _drawn("full-wide", Sizes(wide, Mode.VERIFY, FULL_REQUESTS, FULL_KEYS, wide=True))]
