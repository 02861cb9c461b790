"""Forwards of production size for every profile, in every mode that the profile has, and for products of profiles."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from typing import Any

from draftmark.geometry import CORE_MODES, LAYOUT_FORMS, AttentionShape, Mode

from ..check import Case
from ..production_sizes import GROUPS, HEAD_DIMS, KEYS, PAGES, REQUESTS, modes_of
from ..profiles import FP8_DTYPE, MANDATORY, Profile
from . import production
from .drawn import Sizes
from .space import Point, covering, log_uniform

SINCE = (1, 5)
PLAIN = "plain"
"""Name of a forward that needs only the profiles of its mode and shape."""
ROUNDED = "rounded fp8"
"""Name of a forward over fp8 KV in which the backend may round q and weights to e4m3."""
MOST_KEYS = KEYS + 200
CROWDS = ((REQUESTS, 26), (27, 33))
WORK = 2**23
"""Most values of K if every request were as long as the longest one. Plain backends pad a batch to that length."""
ODD_DIMS, ODD_PAGES = (48, 80, 96, 112, 160, 192, 224), (5, 48, 100, 256, 784)
"""Head dimensions and page sizes that engines list, apart from those of most models."""
CORE_SHAPE: Point = {
    "head_dim": MANDATORY.head_dim,
    "page": MANDATORY.page_size,
    "group": (MANDATORY.group_size, MANDATORY.group_size),
    "kv_heads": MANDATORY.num_kv_heads,
    "requests": CROWDS[0],
    "dtype": MANDATORY.q_dtype,
}
SHAPE_AXES = {"head_dim": HEAD_DIMS, "page": PAGES, "group": GROUPS, "dtype": ("bfloat16", "float16")}
BY_DEVICE = (Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)
"""Modes outside of the core, which `production.full` does not have."""
SCALES = (None, 0.6, 1.7)
"""Softmax scales as multiples of the default."""
FULL_REQUESTS, FULL_KEYS = 33, 8192
"""Requests and keys of forwards that only a device runs."""
Change = Callable[[Sizes, random.Random], Sizes]


def _shaped(draw: Callable[[random.Random], dict[str, Any]]) -> Change:
    return lambda sizes, dice: replace(sizes, attention=replace(sizes.attention, **draw(dice)))


def _with_forms(sizes: Sizes, dice: random.Random) -> Sizes:
    chosen = dice.sample(LAYOUT_FORMS, dice.randint(1, len(LAYOUT_FORMS)))
    return replace(sizes, forms=tuple(form for form in LAYOUT_FORMS if form in chosen))


def _odd(dice: random.Random) -> dict[str, Any]:
    odd = {"head_dim": dice.choice(ODD_DIMS), "page_size": dice.choice(ODD_PAGES)}
    kept = dice.choice((("head_dim",), ("page_size",), tuple(odd), ()))
    return {name: odd[name] for name in kept} or {"q_dtype": "float32", "kv_dtype": "float32"}


FEATURES: dict[str, Change] = {
    PLAIN: lambda sizes, dice: sizes,
    Profile.ODD_SHAPES: _shaped(_odd),
    Profile.WINDOW: _shaped(lambda dice: {"window_left": log_uniform(dice, 100, KEYS - 1)}),
    Profile.SOFT_CAP: _shaped(lambda dice: {"logits_soft_cap": dice.choice((5.0, 20.0, 50.0))}),
    Profile.SINKS: _shaped(lambda dice: {"sinks": True}),
    Profile.FP8: _shaped(lambda dice: {"kv_dtype": FP8_DTYPE}),
    ROUNDED: _shaped(lambda dice: {"kv_dtype": FP8_DTYPE, "round_to_e4m3": True}),
    Profile.WIDE_TAILS: lambda sizes, dice: replace(sizes, wide=True),
    Profile.OVERLAP: lambda sizes, dice: replace(sizes, overlap=True),
    Profile.ENGINE_FORMS: _with_forms,
    Profile.BATCH_INVARIANCE: lambda sizes, dice: replace(sizes, batch_invariant=True),
}
"""Change that makes a forward need a profile. Profiles that are not listed follow from the mode and the shape."""
FREE = tuple(name for name in FEATURES if name not in (PLAIN, Profile.ODD_SHAPES, Profile.FP8, ROUNDED))
"""Features of products. fp8 KV is fixed there, because a backend without it must meet all other products too."""


def alone() -> list[Case]:
    """Return a forward for each profile in each of its modes that needs no profile beyond those of its mode and shape.

    The shape is the core's own for plain forwards, and in the first mode of each feature. In the other core modes each
    feature meets every range of GQA groups.
    """
    rows = [{"feature": PLAIN, "mode": mode, **CORE_SHAPE} for mode in Mode]
    for number, feature in enumerate(FEATURES):
        first = next(mode for mode in (Mode.DECODE, *Mode) if _possible({"feature": feature, "mode": mode}))
        core = {} if feature in (PLAIN, Profile.ODD_SHAPES) else CORE_SHAPE
        modes = [mode for mode in Mode if _possible({"feature": feature, "mode": mode})]
        others = [mode for mode in (*CORE_MODES, *Mode) if mode in modes and mode is not first]
        turns = {mode: {"group": GROUPS[(number + n) % len(GROUPS)]} for n, mode in enumerate(dict.fromkeys(others))}
        rows += [{"feature": feature, "mode": mode, **turns.get(mode, core)} for mode in modes]
    axes = {"feature": tuple(FEATURES), "mode": tuple(Mode), **SHAPE_AXES, "requests": CROWDS}
    points = covering(axes, random.Random("alone"), rows, _possible)
    return [*(_case(str(point["feature"]), point, n) for n, point in enumerate(points)), *_with_many_heads()]


MANY_HEADS = 8
"""KV heads of most models on one rank."""


def _with_many_heads() -> list[Case]:
    """Return a forward of few requests with `MANY_HEADS` KV heads for each feature; a crowd has at most two of them."""
    found = []
    for number, feature in enumerate(FEATURES):
        modes = [mode for mode in CORE_MODES if _possible({"feature": feature, "mode": mode})]
        shape = {name: values[number % len(values)] for name, values in SHAPE_AXES.items()}
        shape |= {"head_dim": 64, "kv_heads": MANY_HEADS, "group": (1 + number % 4,) * 2, "requests": (3, 4)}
        point = {**shape, "feature": feature, "mode": modes[number % len(modes)]}
        found.append(_case(f"heads{MANY_HEADS}-{feature}", point, number))
    return found


PROMPT = 1_100
"""Rows of a long prompt."""


def prompts() -> list[Case]:
    """Return prefills with a prompt of `PROMPT` rows, without a prefix or after one, for each profile of EXTEND."""
    found = []
    for number, feature in enumerate(FEATURES):
        if not _possible({"feature": feature, "mode": Mode.EXTEND}):
            continue
        name = _slug(f"prompt-{feature}", Mode.EXTEND, number)
        one_head = AttentionShape(1, 1, 64, PAGES[number % len(PAGES)], "float16", "float16")
        sizes = Sizes(MANDATORY if feature == PLAIN else one_head, Mode.EXTEND, 3, PROMPT + 300 * (number % 2))
        sizes = FEATURES[feature](replace(sizes, prompt=PROMPT), random.Random(name))
        found.append(Case(name, sizes.draw(name), SINCE))
    return found


def modules() -> list[Case]:
    """Return crowds of DRAFT_EXTEND with two and three MTP modules."""
    found = []
    for count in (2, 3):
        name = _slug(f"modules{count}", Mode.DRAFT_EXTEND, count)
        sizes = Sizes(MANDATORY, Mode.DRAFT_EXTEND, REQUESTS, KEYS, modules=count)
        found.append(Case(name, sizes.draw(name), SINCE))
    return found


def products() -> list[Case]:
    """Return forwards in which every two features meet, and every feature meets every mode, with and without fp8 KV.

    Each pair of features also has a VERIFY without other features. A backend that refuses those still runs the pair.
    """
    axes = {"mode": tuple(Mode), **dict.fromkeys(FREE, (False, True))}
    pairs: list[Point] = [{"mode": Mode.VERIFY, **{one: one in two for one in FREE}} for two in combinations(FREE, 2)]
    found = []
    for stored, first in (("as-q", pairs), (Profile.FP8, ())):
        points = covering(axes, random.Random(f"products {stored}"), first, _possible)
        for n, point in enumerate(points):
            dice = random.Random(f"product {stored} {n}")
            shape = {name: dice.choice(values) for name, values in SHAPE_AXES.items()}
            found.append(_case(f"together-{stored}", {**point, **shape, "requests": CROWDS[0], stored: True}, n))
    return found


def full_size() -> list[Case]:
    """Return forwards of 33 requests with up to 8,192 keys in the shapes of models, for a device.

    They cover every feature in each of its modes, and the two modes outside of the core.
    """
    found: list[Case] = []
    models = [shape.geometry.attention for shape in production.full_size()]
    for number, (feature, mode) in enumerate(product(FEATURES, Mode)):
        if not _possible({"feature": feature, "mode": mode}) or (feature == PLAIN and mode not in BY_DEVICE):
            continue
        for attention in models if feature == PLAIN else models[number % len(models) :][:1]:
            name = _slug(f"full-{feature}", mode, len(found))
            sizes = FEATURES[feature](Sizes(attention, mode, FULL_REQUESTS, FULL_KEYS), random.Random(name))
            found.append(Case(name, sizes.draw(name), SINCE))
    return found


def _possible(point: Point) -> bool:
    """Return False for a wide tail in a mode in which the tail has no mask."""
    wide = point.get(Profile.WIDE_TAILS) is True or point.get("feature") == Profile.WIDE_TAILS
    return not wide or point.get("mode", Mode.VERIFY) in modes_of(Profile.WIDE_TAILS)


def _slug(begin: str, mode: Mode, number: int) -> str:
    return f"{begin}-{mode.value}-{number}".replace(" ", "-").replace("_", "-")


def _case(begin: str, point: Point, number: int) -> Case:
    values: dict[str, Any] = point
    mode: Mode = values["mode"]
    name = _slug(begin, mode, number)
    dice = random.Random(name)
    requests, group = dice.randint(*values["requests"]), dice.randint(*values["group"])
    keys = dice.randint(KEYS, MOST_KEYS)
    heads = values.get("kv_heads") or log_uniform(dice, 1, max(1, WORK // (requests * keys * values["head_dim"])))
    dtype = values["dtype"]
    attention = AttentionShape(group * heads, heads, values["head_dim"], values["page"], dtype, dtype)
    sizes = Sizes(attention, mode, requests, keys)
    for feature, change in FEATURES.items():
        if values.get("feature") == feature or values.get(feature):
            sizes = change(sizes, dice)
    if values.get("feature") != PLAIN:
        sizes = replace(sizes, attention=replace(sizes.attention, softmax_scale=_scale(values["head_dim"], number)))
    return Case(name, sizes.draw(name), SINCE)


def _scale(head_dim: int, number: int) -> float | None:
    """Return the softmax scale of a case: default, smaller or larger, by its number. A scale needs no profile."""
    factor = SCALES[number % len(SCALES)]
    return None if factor is None else factor * head_dim**-0.5
