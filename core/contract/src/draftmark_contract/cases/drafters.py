"""Rounds of a target and a drafter that read one KV: drafts, verification, rejection. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import Case
from ..oracle.formulas import draft_steps, rows_and_tail
from ..oracle.history import NO_PARENT, chain
from .forwards import ForwardCase, block_masks, uniform
from .geometries import PAGE128, SMALL
from .trees import beams

SINCE = (1, 5)
LIMITS = Limits(max_num_reqs=3, max_context_len=200, max_extend_tokens=16, capture_batch_sizes=(1, 4))
CHAIN = DraftShape(topk=1, num_steps=4, num_draft_tokens=4, block_size=4)
TREE = DraftShape(topk=2, num_steps=4, num_draft_tokens=6)
VERIFIED = (NO_PARENT, 0, 1, 2, 0, 1)
"""Parents in a verified tree. Its first path is a chain, so accepted tokens lie where their KV was stored."""
LENS, ACCEPTED = (140, 37, 16), ((1, 4, 2), (3, 1, 1))
"""Prefix lengths before the first round, and the tokens that each round accepts. The others are rejected."""


@dataclass(frozen=True)
class Rounds:
    """Rounds of one pair of a target and a draft model, each a list of forwards in order.

    Attributes:
        target, draft: geometries of the two models.
        forwards: ``[rounds][forwards]``. The target's forward is the one in VERIFY.
    """

    target: Geometry
    draft: Geometry
    forwards: tuple[tuple[ForwardCase, ...], ...]

    @property
    def geometry(self) -> Geometry:
        """The drafter's geometry, which has the more special modes."""
        return self.draft


def rounds() -> list[Case]:
    """Return rounds for drafters of two kinds, draft steps and draft blocks, with each kind of layer, and for trees."""
    half = replace(SMALL, q_dtype="float16", kv_dtype="float16")
    shapes = {
        "page16": half,
        "window": replace(half, page_size=8, window_left=21),
        "kv8": replace(SMALL, kv_dtype="float8_e4m3fn"),
        "kv8-window": replace(SMALL, kv_dtype="float8_e4m3fn", window_left=30),
        "page128": PAGE128,
    }
    kinds = {"steps": (Mode.DRAFT, Mode.DRAFT_EXTEND), "block": (Mode.DRAFT_BLOCK,)}
    chains = [
        Case(f"{name}-{kind}", _rounds(shape, modes), SINCE)
        for name, shape in shapes.items()
        for kind, modes in kinds.items()
    ]
    trees = ("window", "kv8")
    return [*chains, *(Case(f"{name}-tree", _rounds(shapes[name], kinds["steps"], TREE), SINCE) for name in trees)]


def _rounds(shape: AttentionShape, modes: tuple[Mode, ...], drafts: DraftShape = CHAIN) -> Rounds:
    target = Geometry.create(shape, LIMITS, drafts, modes=(Mode.EXTEND, Mode.DECODE, Mode.VERIFY))
    draft = Geometry.create(shape, LIMITS, drafts, modes=modes)
    ends = [length + sum(counts) for length, *counts in zip(LENS, *ACCEPTED, strict=True)]
    whole = uniform("round", target, Mode.VERIFY, ends, len(LENS) + 1, tree="chain")
    steps = [(Mode.DRAFT, step) for step in range(draft_steps(draft))] if Mode.DRAFT in modes else []
    before = steps or [(Mode.DRAFT_BLOCK, 0)]
    after = [(Mode.DRAFT_EXTEND, 0)] if Mode.DRAFT_EXTEND in modes else []
    lens, found = list(LENS), []
    for counts in ACCEPTED:
        drafted = [_at(whole, draft, mode, step, lens) for mode, step in before]
        verified = _at(whole, target, Mode.VERIFY, 0, lens)
        # The target has stored the accepted tokens, so the drafter's own forward over them stores nothing.
        read = [replace(_at(whole, draft, mode, step, lens), shares_kv=True) for mode, step in after]
        found.append((*drafted, verified, *read))
        lens = [length + count for length, count in zip(lens, counts, strict=True)]
    return Rounds(target, draft, tuple(found))


def _at(whole: ForwardCase, geometry: Geometry, mode: Mode, step: int, lens: list[int]) -> ForwardCase:
    """Return a forward of these requests, with these prefix lengths, in the pages that they have at the end."""
    rows, tail = rows_and_tail(geometry, mode, step)
    prefixes = [*lens, *[0] * (len(whole.requests) - len(lens))]
    topk = geometry.draft.topk
    causal = topk == 1 or mode not in (Mode.DRAFT, Mode.VERIFY)

    def parents(seed: int) -> tuple[int, ...]:
        if causal:
            return chain(tail)
        return VERIFIED if mode is Mode.VERIFY else beams(topk, step, seed + lens[0])

    requests = tuple(
        replace(
            one, prefix=length, parents=parents(n) if one.live else chain(tail), rows=rows,
            masks=block_masks(mode, tail) if one.live else (),
        )
        for n, (one, length) in enumerate(zip(whole.requests, prefixes, strict=True))
    )  # fmt: skip
    label = f"{mode.value}{step or ''}-{lens[0]}"
    return replace(whole, name=label, geometry=geometry, mode=mode, step=step, requests=requests, causal=causal)
