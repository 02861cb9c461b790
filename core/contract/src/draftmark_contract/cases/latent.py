"""Latent layers (MLA, absorbed): rows, heads, pages, trees and forms for the checks of latent rows. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftmark.geometry import CORE_MODES, AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from .forward_sets import last_steps
from .forwards import ForwardCase, of_mode, ragged, uniform
from .geometries import Shape

SINCE = (1, 5)
SCALE = 192**-0.5
"""Scale of DeepSeek V3: its heads have 128 + 64 elements before absorption."""
HALF: dict[str, Any] = {"q_dtype": "float16", "kv_dtype": "float16"}
LIMITS = Limits(
    max_num_reqs=5, max_context_len=300, max_extend_tokens=48, capture_batch_sizes=(1, 6), row_budgets=(16,)
)
TREE = DraftShape(topk=2, num_steps=3, num_draft_tokens=7, block_size=5)
LENS, ROWS = (130, 37, 0), (3, 7, 1)
"""Prefix lengths, and new tokens of each request where they may differ."""
MODES = {
    "plain": (Mode.EXTEND, Mode.DECODE),
    "core": CORE_MODES,
    "ragged": (Mode.EXTEND, Mode.RAGGED_VERIFY),
    "block": (Mode.EXTEND, Mode.DRAFT_BLOCK),
}
"""Sets of modes, so that a backend may refuse some of them."""
PARTS = (Form.LATENT_PARTS,)


def rows_of(heads: int, page: int, width: int = 576, value: int = 512, **more: Any) -> AttentionShape:
    """Return a latent layer with rows of `width` elements. The first `value` elements are the value."""
    given: dict[str, Any] = {"softmax_scale": SCALE, **more}
    return AttentionShape(heads, 1, width, page, value_dim=value, latent=True, **given)


ATTENTIONS = {
    "h16-page64": rows_of(16, 64),
    "h12-page16": rows_of(12, 16, **HALF),
    "h128-page1": rows_of(128, 1),
    "h5-512-page48": rows_of(5, 48, 512, 512, **HALF),
    "h20-256-page32": rows_of(20, 32, 320, 256),
    "h96-128-page128": rows_of(96, 128, 160, 128, **HALF),
    "parts-h8-page128": rows_of(8, 128),
}
"""Layers that most checks run: three of the latent profile, three of other shapes, one in two parts."""
MOST_HEADS = "h128-page1"
"""Layer that most checks run in two sets of modes only, because its rows are the widest."""


def forms_of(name: str) -> tuple[Form, ...]:
    """Return the forms of a layer of `ATTENTIONS`."""
    return PARTS if name.startswith("parts") else ()


def geometry_of(
    attention: AttentionShape,
    modes: tuple[Mode, ...],
    forms: tuple[Form, ...] = (),
    limits: Limits = LIMITS,
    draft: DraftShape = TREE,
) -> Geometry:
    """Return a geometry without drafts if no mode has them, and without row budgets if no mode needs them."""
    plain = set(modes) <= {Mode.EXTEND, Mode.DECODE}
    block = draft.block_size if Mode.DRAFT_BLOCK in modes else 0
    draft = DraftShape() if plain else replace(draft, block_size=block)
    limits = limits if Mode.RAGGED_VERIFY in modes else replace(limits, row_budgets=())
    return Geometry.create(attention, limits, draft, modes=modes, forms=forms)


def forwards_of(geometry: Geometry, lens: Sequence[int] = LENS, seed: int = 0) -> list[ForwardCase]:
    """Return one forward of each mode at its last draft step, with one padded request."""
    rows, last = ROWS[: len(lens)], last_steps(geometry)
    return [
        of_mode(mode.value, geometry, mode, lens, rows, len(lens) + 1, step=last[mode], seed=seed)
        for mode in geometry.modes
    ]


def each_mode(*names: str, sets: Sequence[str] = tuple(MODES)) -> list[Case]:
    """Return the forwards of each set of modes, for these layers or for all of them."""
    found = []
    for name, attention in ATTENTIONS.items():
        chosen = sets if not names or name in names else ()
        for label in [one for one in chosen if one in ("plain", "ragged") or name != MOST_HEADS]:
            geometry = geometry_of(attention, MODES[label], forms_of(name))
            found.append(Shape(name, geometry, SINCE).case(forwards_of(geometry), label))
    return found


def scales() -> list[Case]:
    """Return forwards of layers with the scales of models, yarn's mscale included, and with a scale of 1."""
    named = {
        "192": SCALE,
        "256": 256**-0.5,
        "mscale": SCALE * 1.8738**2,
        "128": 128**-0.5,
        "1": 1.0,
    }
    found = []
    for name, scale in named.items():
        geometry = geometry_of(rows_of(16, 64, softmax_scale=scale, **HALF), (Mode.EXTEND, Mode.DECODE, Mode.VERIFY))
        found.append(Shape(f"scale-{name}", geometry, SINCE).case(forwards_of(geometry, LENS[:2])))
    return found


HEADS = (1, 5, 6, 12, 16, 20, 96, 128)
"""Query heads of a rank: those of models, divided by any number of ranks."""
COUNTS = (1, 2, 3, 4, 5, 8, 16, 17, 33, 64)
"""Rows of a request, so that a tile of 64 holds many requests' rows and heads, or part of one row."""
MANY = 1024
"""Product of rows and heads above which rows have 160 elements, so that the check stays quick."""


def rows_and_heads() -> list[Case]:
    """Return a verify of two live requests for each number of rows with each number of heads."""
    found = []
    for heads in HEADS:
        for rows in COUNTS:
            small = rows * heads > MANY
            attention = rows_of(heads, 16, *((160, 128) if small else (576, 512)))
            limits = replace(LIMITS, max_num_reqs=3, max_context_len=64, max_extend_tokens=8)
            geometry = geometry_of(attention, (Mode.EXTEND, Mode.VERIFY), (), limits, DraftShape(1, 1, rows))
            tree = "random" if rows > 1 else "chain"
            forward = uniform("verify", geometry, Mode.VERIFY, (29, 7), 3, tree=tree, seed=rows)
            found.append(Case(f"rows{rows}-heads{heads}", forward, SINCE))
    return found


TREE_PAGES = (1, 2, 16, 32, 48, 64, 128)


def trees() -> list[Case]:
    """Return trees after prefixes that end at every side of a page boundary, with tails over two and three pages."""
    found = []
    for page in TREE_PAGES:
        tail = min(7 + 2 * page, 40)
        for label, rows in (("small", 7), ("tail", tail)):
            draft = DraftShape(2, 3, rows)
            limits = replace(LIMITS, max_num_reqs=6, max_context_len=3 * page + 40, max_extend_tokens=8)
            geometry = geometry_of(rows_of(8, page, **HALF), (Mode.EXTEND, Mode.VERIFY), (), limits, draft)
            ends = (0, 1, max(0, page - 1), page, 3 * page - 1, 2 * page)
            kinds = ("random", "deep", "masks") if label == "small" else ("random",)
            forwards = [uniform(kind, geometry, Mode.VERIFY, ends, 6, tree=kind, seed=page) for kind in kinds]
            found.append(Case(f"page{page}-{label}", forwards, SINCE))
    return found


def one_row() -> list[Case]:
    """Return DECODE, and forwards of one row in the modes that chains and trees have, for layers of few requests."""
    found = []
    limits = replace(LIMITS, max_context_len=700)
    for name in ("h16-page64", "h20-256-page32", "h128-page1"):
        modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.DRAFT_EXTEND)
        geometry = geometry_of(ATTENTIONS[name], modes, (), limits, DraftShape())
        lens = (650, 3, 64, 0)
        made = [uniform(mode.value, geometry, mode, lens, 5, tree="chain") for mode in modes[1:]]
        made.append(uniform("verify-tree", geometry, Mode.VERIFY, lens, 5, tree="masks"))
        made.append(ragged("extend-one-row", geometry, lens, (1, 1, 1, 1), padded=1))
        found.append(Shape(name, geometry, SINCE).case(made))
    return found


MOSTLY = 18
"""Requests of a batch with one live request: more rows than a kernel with a limit of 16 rows takes."""


def padded() -> list[Case]:
    """Return batches in which one short request is live among `MOSTLY`, in every mode."""
    found = []
    limits = replace(LIMITS, max_num_reqs=3, capture_batch_sizes=(MOSTLY,), row_budgets=(MOSTLY,))
    for name in ("h16-page64", "h20-256-page32", "parts-h8-page128"):
        for label, modes in MODES.items():
            geometry = geometry_of(ATTENTIONS[name], modes, forms_of(name), limits)
            last = last_steps(geometry)
            forwards = [
                of_mode(mode.value, geometry, mode, (prefix,), (1,), MOSTLY, step=last[mode], seed=prefix)
                for mode in modes
                for prefix in (0, 1)
            ]
            found.append(Shape(name, geometry, SINCE).case(forwards, label))
    return found


def blocks() -> list[Case]:
    """Return draft blocks of 2 to 16 rows at both sides of a page boundary."""
    found = []
    for name in ("h16-page64", "h12-page16", "h96-128-page128", "parts-h8-page128"):
        size = ATTENTIONS[name].page_size
        for rows in (2, 16):
            draft = DraftShape(1, 1, 2, block_size=rows)
            geometry = geometry_of(ATTENTIONS[name], MODES["block"], forms_of(name), LIMITS, draft)
            lens = (size - 1, 0, 2 * size, 131)
            found.append(
                Shape(name, geometry, SINCE).case(
                    [uniform("block", geometry, Mode.DRAFT_BLOCK, lens, 5, seed=rows)], f"rows{rows}"
                )
            )
    return found


@dataclass(frozen=True)
class Special:
    """Forwards of a latent layer with a feature that a backend may refuse, with words that name it."""

    geometry: Geometry
    forwards: tuple[ForwardCase, ...]
    words: tuple[str, ...]


def special() -> list[Case]:
    """Return forwards of latent layers with features and widths that a backend may refuse by name."""
    base = ATTENTIONS["h16-page64"]
    named: dict[str, tuple[AttentionShape, tuple[str, ...]]] = {
        "window": (replace(base, window_left=60), ("window",)),
        "cap": (replace(base, logits_soft_cap=30.0), ("cap",)),
        "sinks": (replace(base, sinks=True), ("sink",)),
        "fp8": (replace(base, kv_dtype="float8_e4m3fn"), ("fp8", "float8")),
        "float32": (replace(base, q_dtype="float32", kv_dtype="float32"), ("float32",)),
        "width": (replace(base, head_dim=584, value_dim=500), ("584", "500")),
        "all-value": (replace(base, head_dim=64, value_dim=64), ("64",)),
        "long-rest": (replace(base, head_dim=320, value_dim=64), ("320", "64")),
        "invariance": (base, ("invarian",)),
    }
    found = []
    for name, (attention, words) in named.items():
        limits = replace(LIMITS, batch_invariant=name == "invariance")
        geometry = geometry_of(attention, (Mode.EXTEND, Mode.DECODE, Mode.VERIFY), (), limits)
        found.append(Case(name, Special(geometry, tuple(forwards_of(geometry)), words), SINCE))
    return found


def engine_stores() -> list[Case]:
    """Return forwards with KV that the engine stores, as the only form and with others."""
    sets = {
        "only": (Form.ENGINE_STORES,),
        "slots": (Form.ENGINE_STORES, Form.ENGINE_SLOTS),
        "all": (Form.ENGINE_SLOTS, Form.ENGINE_TABLE, Form.STRIDED_KV, Form.ENGINE_STORES),
    }
    found = []
    for name, forms in sets.items():
        for label, modes in MODES.items():
            geometry = geometry_of(ATTENTIONS["h16-page64"], modes, forms)
            found.append(Shape(name, geometry, SINCE).case(forwards_of(geometry), label))
    parts = geometry_of(ATTENTIONS["parts-h8-page128"], CORE_MODES, (*PARTS, Form.ENGINE_STORES))
    return [*found, Shape("parts", parts, SINCE).case(forwards_of(parts), "core")]


def pairs() -> list[Case]:
    """Return forwards of a latent target and a draft head with K and V apart, and of one with latent rows."""
    target = ATTENTIONS["h16-page64"]
    drafts = {
        "gqa": AttentionShape(8, 2, 128, 64),
        "latent": rows_of(8, 64),
        "narrow": AttentionShape(8, 4, 192, 64, value_dim=128),
    }
    found = []
    for name, draft in drafts.items():
        shapes = tuple(geometry_of(one, CORE_MODES) for one in (target, draft))
        found.append(Case(name, (shapes, forwards_of(shapes[0])), SINCE))
    return found


def far() -> list[Case]:
    """Return forwards on pages after which element offsets of rows do not fit 32 bits: slots from 3.7 million on."""
    found = []
    for name in ("h16-page64", "h12-page16"):
        attention = ATTENTIONS[name]
        geometry = geometry_of(attention, CORE_MODES)
        first, last = 2**31 // (attention.page_size * attention.head_dim) + 3, last_steps(geometry)
        for mode in (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.DRAFT):
            made = of_mode(mode.value, geometry, mode, (70, 17), (3, 4), 3, step=last[mode], first_page=first)
            found.append(Shape(name, geometry, SINCE).case(made, mode.value))
    return found
