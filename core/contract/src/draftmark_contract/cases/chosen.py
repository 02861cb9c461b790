"""Layers with chosen keys (sparse attention): widths, lists, trees and production sizes. Does not import torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from ..oracle.chosen import WHOLE
from .drawn import Sizes
from .features import FULL_KEYS, FULL_REQUESTS
from .forward_sets import last_steps
from .forwards import of_mode, ragged, uniform
from .geometries import Shape
from .graph_rounds import captured, programs_of, replays, sizes_of
from .latent import HALF, LIMITS, MODES, Special, forwards_of, geometry_of, rows_of

SINCE = (1, 5)
PRODUCTION, POOLED = 2048, 2176
"""Widths of the lists of DeepSeek V3.2 and GLM-5, and of GLM-5.3, which adds the newest keys to its list."""
CROWD = 24
"""Requests of the forwards with lists of production width."""


def listed(width: int, *rows: Any, **more: Any) -> AttentionShape:
    """Return a latent layer with lists of at most `width` keys; `rows` and `more` as in `latent.rows_of`."""
    return rows_of(*rows, chosen_width=width, **more)


ATTENTIONS = {
    "w48-h16-page64": listed(48, 16, 64),
    "w33-h12-page16": listed(33, 12, 16, **HALF),
    "w130-h5-page1": listed(130, 5, 1, 160, 128),
    "w1-h20-page48": listed(1, 20, 48, 256, 256, **HALF),
    "w300-h128-page32": listed(300, 128, 32, 320, 256),
}
"""Layers with lists shorter and longer than a request's keys, of several head counts, pages and widths of rows."""


def each_mode(*names: str) -> list[Case]:
    """Return two forwards of every mode with other lists, for these layers or for all of them."""
    found = []
    for name, attention in ATTENTIONS.items():
        for label in MODES if not names or name in names else ():
            geometry = geometry_of(attention, MODES[label])
            forwards = [replace(one, draw=draw) for one in forwards_of(geometry) for draw in (0, 1)]
            found.append(Shape(name, geometry, SINCE).case(forwards, label))
    return found


def some_modes() -> list[Case]:
    """Return the forwards of `each_mode` for two layers."""
    return each_mode("w48-h16-page64", "w130-h5-page1")


def every_kind() -> list[Case]:
    """Return decodes of five requests in which every row has each kind of list in turn, for each width."""
    found = []
    for width in (1, 2, 31, 64, 65, 256):
        geometry = geometry_of(listed(width, 8, 16, 160, 128), (Mode.EXTEND, Mode.DECODE, Mode.VERIFY))
        made = [uniform(f"verify-{n}", geometry, Mode.VERIFY, (90, 0, 17, 200, 1), 5, seed=n) for n in range(2)]
        forwards = [replace(one, draw=draw) for one in made for draw in range(3)]
        found.append(Case(f"width{width}", forwards, SINCE))
    return found


def trees() -> list[Case]:
    """Return trees with lists of every key that a row sees, after prefixes on both sides of a page boundary."""
    found = []
    for page in (1, 16, 48, 64):
        limits = replace(LIMITS, max_num_reqs=6, max_context_len=3 * page + 40, max_extend_tokens=8)
        width = 3 * page + 40 + 17
        geometry = geometry_of(
            listed(width, 8, page, **HALF), (Mode.EXTEND, Mode.VERIFY), (), limits, DraftShape(2, 3, 9)
        )
        ends = (0, 1, max(0, page - 1), page, 3 * page - 1, 2 * page)
        forwards = [
            replace(uniform(kind, geometry, Mode.VERIFY, ends, 6, tree=kind, seed=page), draw=WHOLE)
            for kind in ("random", "deep", "masks", "chain")
        ]
        found.append(Case(f"page{page}", forwards, SINCE))
    return found


def padded() -> list[Case]:
    """Return batches in which one short request is live among 18, in every mode."""
    found = []
    limits = replace(LIMITS, max_num_reqs=3, capture_batch_sizes=(18,), row_budgets=(18,))
    for label, modes in MODES.items():
        geometry = geometry_of(ATTENTIONS["w48-h16-page64"], modes, (), limits)
        last = last_steps(geometry)
        forwards = [
            replace(of_mode(mode.value, geometry, mode, (prefix,), (1,), 18, step=last[mode], seed=prefix), draw=prefix)
            for mode in modes
            for prefix in (0, 1)
        ]
        found.append(Case(label, forwards, SINCE))
    return found


def forms() -> list[Case]:
    """Return forwards with KV that the engine stores, with its own slots, and with a page table of its own."""
    sets = {
        "stores": (Form.ENGINE_STORES,),
        "all": (Form.ENGINE_SLOTS, Form.ENGINE_TABLE, Form.STRIDED_KV, Form.ENGINE_STORES),
    }
    found = []
    for name, some in sets.items():
        for label in ("plain", "core", "ragged"):
            geometry = geometry_of(ATTENTIONS["w33-h12-page16"], MODES[label], some)
            found.append(Shape(name, geometry, SINCE).case(forwards_of(geometry), label))
    return found


def special() -> list[Case]:
    """Return forwards of layers with chosen keys and a feature that a backend may refuse by name."""
    base = ATTENTIONS["w48-h16-page64"]
    named: dict[str, tuple[AttentionShape, tuple[str, ...]]] = {
        "cap": (replace(base, logits_soft_cap=30.0), ("cap",)),
        "sinks": (replace(base, sinks=True), ("sink",)),
        "fp8": (replace(base, kv_dtype="float8_e4m3fn"), ("fp8", "float8")),
        "parts": (base, ("latent_parts", "LATENT_PARTS")),
        "heads": (AttentionShape(8, 2, 128, 64, chosen_width=48), ("latent", "chosen", "heads")),
        "narrow": (AttentionShape(6, 3, 64, 16, value_dim=48, chosen_width=48), ("latent", "chosen", "values")),
        "invariance": (base, ("invarian",)),
    }
    found = []
    for name, (attention, words) in named.items():
        limits = replace(LIMITS, batch_invariant=name == "invariance")
        some = (Form.LATENT_PARTS,) if name == "parts" else ()
        geometry = geometry_of(attention, (Mode.EXTEND, Mode.DECODE, Mode.VERIFY), some, limits)
        found.append(Case(name, Special(geometry, tuple(forwards_of(geometry)), words), SINCE))
    return found


def wide() -> list[Case]:
    """Return forwards with lists of production width in every mode, over requests of more keys than a list has."""
    found = []
    for number, mode in enumerate(Mode):
        heads, page = ((8, 64), (16, 16), (5, 1), (8, 128))[number % 4]
        rows = (576, 512) if mode in (Mode.DECODE, Mode.VERIFY) else (160, 128)
        width = POOLED if mode is Mode.VERIFY else PRODUCTION
        sizes = Sizes(listed(width, heads, page, *rows), mode, CROWD, width + 300, 40)
        slug = f"h{heads}-page{page}-{mode.value}".replace("_", "-")
        # Draw 3 has other lists than draw 0. The modes with several rows a request run one of them.
        one = {Mode.EXTEND: (0,), Mode.VERIFY: (3,), Mode.DRAFT_EXTEND: (0,), Mode.DRAFT_BLOCK: (3,)}
        found.append(Case(slug, [replace(sizes.draw(slug), draw=draw) for draw in one.get(mode, (0, 3))], SINCE))
    return found


def graphs() -> list[Case]:
    """Return the batches of each program: those on which graphs are captured, largest first, then the replayed ones."""
    limits = replace(LIMITS, max_context_len=420, capture_batch_sizes=(1, 3, 6), row_budgets=(4, 16))
    found = []
    layers = {"w48-h16-page64": ("core", "ragged", "block"), "w300-h128-page32": ("plain",)}
    for name, sets in layers.items():
        for label in sets:
            geometry = geometry_of(ATTENTIONS[name], MODES[label], (), limits)
            for program in programs_of(geometry):
                sizes = sorted(sizes_of(geometry, program), reverse=True)
                first = [captured(geometry, program, size, short=size == sizes[0]) for size in sizes]
                every = [replays(geometry, program)[which][1] for which in (0, 2, 3)]
                # The last batch is replayed again and again with other lists.
                rounds = [*first, *every, *(replace(every[0], draw=draw) for draw in (1, 2))]
                found.append(Shape(name, geometry, SINCE).case(rounds, program.value))
    return found


def histories() -> list[Case]:
    """Return geometries for random sequences, with a number for each that decides what is drawn."""
    limits = Limits(max_num_reqs=5, max_context_len=84, max_extend_tokens=40, capture_batch_sizes=(1, 3))
    every = replace(limits, row_budgets=(6, 30))
    core = Geometry.create(listed(20, 5, 16, 80, 64), limits, DraftShape(3, 4, 6), modes=CORE_MODES)
    seven = Geometry.create(listed(37, 12, 1, 80, 64, **HALF), every, DraftShape(3, 4, 6, 4), modes=tuple(Mode))
    return [
        Case(f"{name}-{slot}", (geometry, 900 + 2 * number + slot), SINCE)
        for number, (name, geometry) in enumerate({"core": core, "seven": seven}.items())
        for slot in range(2)
    ]


def far() -> list[Case]:
    """Return forwards on pages after which element offsets of rows do not fit 32 bits: slots from 3.7 million on."""
    attention = ATTENTIONS["w48-h16-page64"]
    geometry = geometry_of(attention, (Mode.EXTEND, Mode.DECODE, Mode.VERIFY))
    first = 2**31 // (attention.page_size * attention.head_dim) + 3
    made = [
        ragged("extend", geometry, (70, 17), (3, 4), first_page=first),
        uniform("verify", geometry, Mode.VERIFY, (70, 17), 3, first_page=first),
    ]
    return [Case(one.name, one, SINCE) for one in made]


def full_size() -> list[Case]:
    """Return forwards of 33 requests with lists of production width in the head counts of models, for a device."""
    found = []
    for name, attention in {"128": listed(PRODUCTION, 128, 64), "16": listed(PRODUCTION, 16, 16)}.items():
        for mode in Mode:
            slug = f"full-{name}-{mode.value}".replace("_", "-")
            found.append(Case(slug, Sizes(attention, mode, FULL_REQUESTS, FULL_KEYS).draw(slug), SINCE))
    return found


SIZES = {
    "one": Limits(1, 1, 1),
    "some": Limits(5, 4096 + 33, 512, (1, 2, 8)),
    "many": Limits(256, 131075, 4096, (8, 256)),
}


def sizing() -> list[Case]:
    """Return geometries of one request, of some and of many, with lists of several widths."""
    shapes = {
        **{f"w2048-h{heads}": listed(PRODUCTION, heads, 64) for heads in (1, 16, 20, 128)},
        **{f"w{width}-h16": listed(width, 16, 16) for width in (1, 64, 300)},
    }
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.DRAFT_EXTEND)
    return [
        Case(f"{name}-{size}", Geometry.create(shape, limits, DraftShape(2, 3, 7), modes=modes), SINCE)
        for name, shape in shapes.items()
        for size, limits in SIZES.items()
    ]


def claim() -> list[Case]:
    """Return a small geometry with chosen keys."""
    return [Case("chosen", geometry_of(ATTENTIONS["w48-h16-page64"], MODES["plain"]), SINCE)]
