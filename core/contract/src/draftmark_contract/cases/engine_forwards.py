"""Forwards with an engine's own KV slots, page tables and KV layouts, and modes in which the device sets row counts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from draftmark.geometry import CORE_MODES, LAYOUT_FORMS, AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..check import Case
from ..oracle.formulas import pages
from ..oracle.history import Request, chain
from .forwards import TRAPS, ForwardCase, block_masks, device_tree, ragged, uniform
from .geometries import PAGE128, SMALL, TREE, Shape, mandatory

SINCE = (1, 3)
BUDGETS = (5, 16)
LIMITS = Limits(max_num_reqs=5, max_context_len=84, max_extend_tokens=48, capture_batch_sizes=(6,), row_budgets=BUDGETS)
LONG = replace(LIMITS, max_context_len=255)
BLOCK = DraftShape(topk=1, num_steps=1, num_draft_tokens=3, block_size=7)
"""Draft shape with a block of more rows than a verify tail has."""
HALF = replace(SMALL, q_dtype="float16", kv_dtype="float16")
SINKS, IN_1_4 = AttentionShape(16, 2, 64, 16, window_left=127, sinks=True), (1, 4)
"""Attention of one rank of gpt-oss, and the contract version that added it."""
IN_1_5 = (1, 5)
ATTENTIONS = {
    "page16": HALF,
    "window": replace(HALF, page_size=8, window_left=5, logits_soft_cap=30.0),
    "window0": replace(HALF, window_left=0),
    "page128": PAGE128,
    "model": AttentionShape(32, 8, 128, page_size=16, q_dtype="float16", kv_dtype="float16"),
}
"""Attention shapes. float16 makes one key among a hundred visible in an output."""
PREFIXES = (17, 0, 40, 61, 5)
ROWS_OF = {"mixed": (3, 1, 0, 6, 2), "full": (5, 6, 1, 2, 2), "none": (0, 0, 0, 0, 0), "decodes": (1, 1, 1, 1, 1)}
"""Rows per request that the device decides: with surplus rows after them, without, no rows, and decodes only."""

_MIXED = (Mode.RAGGED_VERIFY, PREFIXES, ROWS_OF["mixed"], "random")


def of_the_device() -> list[Case]:
    """Return RAGGED_VERIFY cases: chains and trees, loose and exact row bounds, spare rows in the batch or none."""
    found = []
    for name, attention in ATTENTIONS.items():
        geometry = Geometry.create(attention, LONG, TREE, modes=(Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY))
        shape, room = Shape(name, geometry, SINCE), max(BUDGETS)
        for kind in ("chain", "random"):
            mixed = _placed(geometry, Mode.RAGGED_VERIFY, PREFIXES, ROWS_OF["mixed"], kind, padded=1)
            found.append(shape.case(replace(mixed, budget=room), kind))
        full = _placed(geometry, Mode.RAGGED_VERIFY, PREFIXES, ROWS_OF["full"], "deep")
        found.append(shape.case(replace(full, budget=room, bounds=ROWS_OF["full"]), "full"))
        decodes = _placed(geometry, Mode.RAGGED_VERIFY, PREFIXES, ROWS_OF["decodes"], "chain")
        found.append(shape.case(replace(decodes, budget=min(BUDGETS), bounds=ROWS_OF["decodes"]), "decodes"))
        found.append(shape.case(replace(decodes, budget=room, bounds=ROWS_OF["decodes"]), "decodes-room"))
        none = _placed(geometry, Mode.RAGGED_VERIFY, PREFIXES, ROWS_OF["none"], "chain")
        found.append(shape.case(replace(none, budget=min(BUDGETS)), "none"))
        found.append(shape.case(replace(none, budget=min(BUDGETS), bounds=ROWS_OF["none"]), "none-known"))
    small = Geometry.create(PAGE128, LIMITS, TREE, modes=(Mode.RAGGED_VERIFY,))
    found.append(Shape("one-page", small, SINCE).case(replace(_placed(small, *_MIXED, padded=1), budget=max(BUDGETS))))
    wide = Geometry.create(HALF, replace(LONG, row_budgets=(80,)), DraftShape(8, 6, 35), modes=(Mode.RAGGED_VERIFY,))
    long = _placed(wide, Mode.RAGGED_VERIFY, (17, 0, 40), (35, 33, 1), "random")
    found.append(Shape("words2", wide, SINCE).case(replace(long, budget=80), "random"))
    limits = replace(LONG, max_num_reqs=10, row_budgets=(240,))
    crowd = Geometry.create(HALF, limits, DraftShape(8, 6, 35), modes=(Mode.RAGGED_VERIFY,))
    many = _placed(crowd, Mode.RAGGED_VERIFY, range(0, 70, 7), (35, 33, 1, 34, 0, 35, 2, 33, 35, 7), "random")
    found.append(Shape("words2-crowd", crowd, SINCE).case(replace(many, budget=240), "random"))
    sinks = Geometry.create(SINKS, LONG, TREE, modes=(Mode.EXTEND, Mode.RAGGED_VERIFY))
    case = replace(_placed(sinks, *_MIXED, padded=1), budget=max(BUDGETS))
    return [*found, Shape("sinks", sinks, IN_1_4).case(case, "random")]


def captures() -> list[Case]:
    """Return lists of forwards of equal size. The first is captured, and its graph replays the other forwards."""
    found = []
    for name, attention in ATTENTIONS.items():
        geometry = Geometry.create(attention, LONG, TREE, modes=(Mode.EXTEND, Mode.RAGGED_VERIFY))
        later = [tuple(reversed(PREFIXES)), PREFIXES, (0, 3, 77, 9, 128)]
        rounds = [
            replace(
                _placed(geometry, Mode.RAGGED_VERIFY, lens, ROWS_OF[rows], "random", padded=1, seed=seed),
                budget=max(BUDGETS),
            )
            for seed, (lens, rows) in enumerate(
                zip((PREFIXES, *later), ("decodes", "mixed", "none", "full"), strict=True)
            )
        ]
        found.append(Shape(name, geometry, SINCE).case(rounds, "ragged_verify"))
        geometry = Geometry.create(attention, LONG, BLOCK, modes=(Mode.EXTEND, Mode.DRAFT_BLOCK))
        rows, size = (BLOCK.block_size,), BLOCK.block_size
        blocks_ = [
            _placed(geometry, Mode.DRAFT_BLOCK, lens, rows * len(lens), "chain", padded=6 - len(lens))
            for lens in ((17, 0), (125, 1, 60, 3, 0), (17,), (255 - size,) * 2)
        ]
        found.append(Shape(name, geometry, SINCE).case(blocks_, "draft_block"))
        causal = [one.with_causal_block() for one in blocks_]
        found.append(Shape(name, geometry, IN_1_5).case(causal, "causal_block"))
    return found


def blocks() -> list[Case]:
    """Return DRAFT_BLOCK cases: prefixes from 0 tokens on, padded requests, blocks that cross a page boundary."""
    found = []
    for name, attention in ATTENTIONS.items():
        geometry = Geometry.create(attention, LONG, BLOCK, modes=(Mode.EXTEND, Mode.DRAFT_BLOCK))
        forward = _placed(geometry, Mode.DRAFT_BLOCK, (17, 0, 125, 1), (BLOCK.block_size,) * 4, "chain", padded=2)
        found.append(Shape(name, geometry, SINCE).case(forward))
    sinks = Geometry.create(SINKS, LONG, BLOCK, modes=(Mode.EXTEND, Mode.DRAFT_BLOCK))
    forward = _placed(sinks, Mode.DRAFT_BLOCK, (17, 125), (BLOCK.block_size,) * 2, "chain", padded=1)
    return [*found, Shape("sinks", sinks, IN_1_4).case(forward)]


def both_blocks() -> list[Case]:
    """Return lists of DRAFT_BLOCK forwards that alternate between causal and other blocks."""
    found = []
    for name, attention in (ATTENTIONS | {"sinks": SINKS}).items():
        geometry = Geometry.create(attention, LONG, BLOCK, modes=(Mode.EXTEND, Mode.DRAFT_BLOCK))
        rows = (BLOCK.block_size,)
        made = [
            _placed(geometry, Mode.DRAFT_BLOCK, lens, rows * len(lens), "chain", padded=5 - len(lens), seed=seed)
            for seed, lens in enumerate(((17, 0, 125, 1), (60, 3), (5, 125, 17)))
        ]
        forwards = [made[0].with_causal_block(), made[1], made[2].with_causal_block(), made[0]]
        found.append(Shape(name, geometry, IN_1_5).case(forwards))
    return found


def stored_only() -> list[Case]:
    """Return lists of forwards with some that only store rows: prompts, decodes, accepted rows and blocks."""
    draft = replace(TREE, block_size=7)
    found = []
    for name, attention in {"core": mandatory().attention, **ATTENTIONS}.items():
        kinds: dict[str, tuple[Mode, ...]] = {"core": (Mode.EXTEND, Mode.DECODE)}
        if name != "core":
            kinds = {"draft": (Mode.EXTEND, Mode.DRAFT_EXTEND), "block": (Mode.EXTEND, Mode.DRAFT_BLOCK)}
        for kind, modes in kinds.items():
            geometry = Geometry.create(attention, LONG, DraftShape() if name == "core" else draft, modes=modes)
            extend, rows = (_with_rows(geometry, mode) for mode in modes)
            skip = [replace(one, attends=False) for one in (*extend, *rows)]
            forwards = [skip[0], rows[0], skip[2], skip[3], extend[1], skip[1], rows[1]]
            found.append(Shape(name, geometry, IN_1_5).case(forwards, kind))
    return found


def stored_only_captures() -> list[Case]:
    """Return lists of forwards of equal size that only store rows; the first is captured."""
    found = []
    for name, attention in ATTENTIONS.items():
        for mode in (Mode.DRAFT_EXTEND, Mode.DRAFT_BLOCK):
            geometry = Geometry.create(attention, LONG, replace(TREE, block_size=7), modes=(Mode.EXTEND, mode))
            rounds = [replace(one, attends=False) for one in _with_rows(geometry, mode)]
            found.append(Shape(name, geometry, IN_1_5).case(rounds, mode.value))
    return found


def _with_rows(geometry: Geometry, mode: Mode) -> list[ForwardCase]:
    """Return two forwards of this mode, of one size."""
    if mode is Mode.EXTEND:
        return [ragged("extend", geometry, (17, 0, 40), rows, padded=1) for rows in ((3, 40, 1), (1, 5, 2))]
    return [uniform(mode.value, geometry, mode, lens, 6, seed=lens[0]) for lens in ((17, 0, 40), (125, 9))]


def modules() -> list[Case]:
    """Return DRAFT_EXTEND cases of two and three MTP modules. Without a form, and with slots, some of them -1.

    Rows without a slot are the first: an engine has their KV already, or no inputs for them.
    """
    found = []
    for name, attention in ATTENTIONS.items():
        for count, forms in ((2, ()), (3, (Form.ENGINE_SLOTS,))):
            draft = DraftShape(topk=1, num_steps=1, num_draft_tokens=5, num_modules=count)
            geometry = Geometry.create(attention, LONG, draft, modes=(Mode.EXTEND, Mode.DRAFT_EXTEND), forms=forms)
            front, wall = count - 1, LONG.max_context_len
            forward = uniform("modules", geometry, Mode.DRAFT_EXTEND, (17, 0, wall - front, 62), 5)
            missing = [*((0, row) for row in range(front)), (2, 0)] if forms else ()
            found.append(Shape(name, geometry, IN_1_5).case(replace(forward, unstored=frozenset(missing)), str(count)))
    return found


def forms() -> list[Case]:
    """Return cases in every mode with one engine input `Form` each, and with all forms at once. Some slots are -1."""
    sets = {one.value: (one,) for one in LAYOUT_FORMS} | {"all": LAYOUT_FORMS}
    found = []
    for name, chosen in sets.items():
        modes = (*CORE_MODES, Mode.RAGGED_VERIFY, Mode.DRAFT_BLOCK)
        draft = replace(TREE, block_size=4)
        for shape, attention in (("page16", HALF), ("page128", PAGE128)):
            for one in modes:
                served = tuple(dict.fromkeys((Mode.EXTEND, one)))
                geometry = Geometry.create(attention, LONG, draft, modes=served, forms=chosen)
                found.append(Shape(f"{name}-{shape}", geometry, SINCE).case(in_mode(geometry, one), one.value))
    return found


def in_mode(geometry: Geometry, mode: Mode) -> ForwardCase:
    """Return a forward of three live requests in this mode, on the largest of `BUDGETS` where the device decides."""
    prefixes = (17, 0, 40)
    if mode is Mode.EXTEND:
        made = ragged("extend", geometry, prefixes, (3, 40, 1), padded=1)
    elif mode is Mode.RAGGED_VERIFY:
        forward = _placed(geometry, mode, prefixes, (3, 0, 2), "random", padded=2)
        made = replace(forward, budget=max(BUDGETS))
    elif mode is Mode.DRAFT_BLOCK:
        made = _placed(geometry, mode, prefixes, (4, 4, 4), "chain", padded=1)
    else:
        made = uniform(mode.value, geometry, mode, prefixes, 4, step=int(mode is Mode.DRAFT))
    if Form.ENGINE_SLOTS not in geometry.forms:
        return made
    live = [row for row in made.rows if made.requests[row[0]].live]
    # Leave out the first row and a later row: a scatter must not store a row without a slot at slot 0 or the last slot.
    return replace(made, unstored=frozenset((live[0], *live[4:5])))


def _placed(
    geometry: Geometry,
    mode: Mode,
    prefixes: Sequence[int],
    rows: Sequence[int],
    kind: str,
    padded: int = 0,
    seed: int = 0,
) -> ForwardCase:
    """Place requests, with one row per tail slot, on shuffled pages. Padded requests use null page 0."""
    size, uniform_rows = geometry.attention.page_size, rows[0] if mode is Mode.DRAFT_BLOCK else 0
    needs = [pages(prefix + n, size) for prefix, n in zip(prefixes, rows, strict=True)]
    ids = list(range(1, 1 + sum(needs)))
    random.Random(f"pages {geometry.attention.page_size} {kind} {seed}").shuffle(ids)
    requests = []
    for n, (prefix, count, need) in enumerate(zip(prefixes, rows, needs, strict=True)):
        own = tuple(ids.pop() for _ in range(need))
        masks = block_masks(mode, count)
        requests.append(Request(prefix, own, device_tree(kind, count, seed + n), count, masks=masks))
    null = (0,) * max(1, pages(uniform_rows, size))
    requests += [Request(0, null, chain(uniform_rows), uniform_rows, live=False)] * padded
    return ForwardCase(
        name=mode.value,
        geometry=geometry,
        mode=mode,
        step=0,
        requests=tuple(requests),
        causal=kind == "chain",
        num_pages=1 + sum(needs) + TRAPS,
        null_pages=1,
    )
