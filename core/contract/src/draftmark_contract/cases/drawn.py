"""Forwards of drawn sizes, in every mode: lengths, rows, trees, padding and common prefixes. Does not import torch."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftmark.geometry import AttentionShape, DraftShape, Form, Geometry, Limits, Mode

from ..oracle.formulas import draft_steps, max_prefix
from .forwards import ForwardCase, device_rows, ragged, uniform
from .space import log_uniform

MASKED = ("random", "deep", "masks")
"""Kinds of trees with mask words in the batch. Wide tails always have mask words."""
NARROW, WIDE = (2, 9), (33, 40)
"""Smallest and largest number of new tokens of a request: one mask word, or two."""
MOST_ROWS = 48
"""Most rows of one request in EXTEND."""


def _with_context(geometry: Geometry, tokens: int) -> Geometry:
    return replace(geometry, limits=replace(geometry.limits, max_context_len=tokens))


def in_one_geometry(forwards: Sequence[ForwardCase]) -> list[ForwardCase]:
    """Return forwards of equal draft shapes in one geometry, with the largest of each of their limits."""
    limits = [one.geometry.limits for one in forwards]
    names = ("max_num_reqs", "max_context_len", "max_extend_tokens")
    most = {name: max(getattr(one, name) for one in limits) for name in names}
    geometry = replace(forwards[0].geometry, limits=replace(limits[0], **most))
    return [replace(one, geometry=geometry) for one in forwards]


@dataclass(frozen=True)
class Sizes:
    """Sizes of one forward that are to be drawn.

    Attributes:
        attention: shape of the layer.
        mode: mode of the forward. DRAFT is its last step.
        requests: number of live requests.
        keys: keys of the longest request, its new tokens included.
        shortest: keys of the shortest request; all lengths are drawn log-uniformly from here to `keys`.
        wide: True for tails of several mask words.
        overlap: True if lengths may be unknown to the host, or exceed max_context_len.
        batch_invariant: True if a request's bits must not depend on its batch.
        forms: input forms of the engine.
        prompt: rows of the longest request in EXTEND; 0 draws them.
        modules: MTP modules that DRAFT_EXTEND runs.
    """

    attention: AttentionShape
    mode: Mode
    requests: int
    keys: int
    shortest: int = 1
    wide: bool = False
    overlap: bool = False
    batch_invariant: bool = False
    forms: tuple[Form, ...] = ()
    prompt: int = 0
    modules: int = 1

    def draw(self, name: str) -> ForwardCase:
        """Return a forward of these sizes. The name decides everything that is drawn."""
        dice = random.Random(name)
        totals = [self.keys, *(log_uniform(dice, self.shortest, self.keys) for _ in range(self.requests - 1))]
        return self.with_lengths(name, totals)

    def with_lengths(
        self, name: str, totals: Sequence[int], padded: int | None = None, committed: bool = False
    ) -> ForwardCase:
        """Return a forward in which request n has totals[n] keys, new tokens included, or more if those are more.

        Args:
            name: decides all else that is drawn.
            padded: number of padded requests; by default a drawn number.
            committed: True if `totals` counts committed tokens only.
        """
        dice = random.Random(f"forward {name}")
        padded = dice.randrange(1 + len(totals) // 6) if padded is None else padded
        rows = self._rows(dice, totals)
        geometry = self._geometry(dice, totals, rows, padded)
        if committed:
            prefixes = list(totals)
            geometry = _with_context(geometry, max(n + new for n, new in zip(totals, rows, strict=True)))
        else:
            tail = geometry.draft.topk * draft_steps(geometry) if self.mode is Mode.DRAFT else 0
            prefixes = [max(0, total - (tail or n)) for total, n in zip(totals, rows, strict=True)]
        if self.overlap and self.mode is not Mode.EXTEND:
            prefixes[0] = max_prefix(geometry)
        return self._forward(dice, name, geometry, prefixes, rows, padded)

    def _rows(self, dice: random.Random, totals: Sequence[int]) -> list[int]:
        """Draw the number of rows of each request; DRAFT has others, which follow from its draft shape."""
        count, most = len(totals), dice.randint(*(WIDE if self.wide else NARROW))
        if self.mode is Mode.EXTEND:
            drawn = [log_uniform(dice, 1, min(total, MOST_ROWS)) for total in totals]
            return [self.prompt or drawn[0], *drawn[1:]]
        if self.mode is Mode.RAGGED_VERIFY:
            return [most, *(dice.randint(0, most) for _ in range(count - 1))]
        return [1 if self.mode is Mode.DECODE else most + self.modules - 1] * count

    def _geometry(self, dice: random.Random, totals: Sequence[int], rows: Sequence[int], padded: int) -> Geometry:
        most = max(rows)
        draft = DraftShape(*((9, 5) if self.wide else (dice.randint(2, 4), dice.randint(2, 4))))
        if self.mode not in (Mode.EXTEND, Mode.DECODE, Mode.DRAFT):
            draft = DraftShape(2, 2, 2 if self.mode is Mode.DRAFT_BLOCK else most, block_size=most)
        if self.modules > 1:
            draft = DraftShape(1, 1, most - self.modules + 1, num_modules=self.modules)
        if self.mode in (Mode.EXTEND, Mode.DECODE):
            draft = DraftShape()
        if self.mode is not Mode.DRAFT_BLOCK:
            draft = replace(draft, block_size=0)
        extend, budget = self.mode is Mode.EXTEND, self.mode is Mode.RAGGED_VERIFY
        limits = Limits(
            max_num_reqs=len(totals) + padded,
            max_context_len=max(*totals, most),
            max_extend_tokens=sum(rows) if extend else 16,
            capture_batch_sizes=(1,),
            overlap=self.overlap,
            batch_invariant=self.batch_invariant,
            row_budgets=(sum(rows) + 1 + dice.randrange(4),) if budget else (),
        )
        return Geometry.create(self.attention, limits, draft, modes=(self.mode,), forms=self.forms)

    def _forward(
        self,
        dice: random.Random,
        name: str,
        geometry: Geometry,
        prefixes: Sequence[int],
        rows: Sequence[int],
        padded: int,
    ) -> ForwardCase:
        seed, mode = dice.randrange(1000), self.mode
        tree = dice.choice(MASKED if self.wide else (*MASKED, "chain"))
        count = len(prefixes) + padded
        if mode is Mode.EXTEND:
            made = ragged(name, geometry, prefixes, rows, padded=padded, seed=seed)
        elif mode is Mode.RAGGED_VERIFY:
            kind, budget = "random" if tree == "masks" else tree, max(geometry.limits.row_budgets)
            made = device_rows(name, geometry, prefixes, rows, budget, tree=kind, padded=count, seed=seed)
            made = replace(made, bounds=tuple(rows) if dice.randrange(2) else ())
        else:
            step = draft_steps(geometry) - 1 if mode is Mode.DRAFT else 0
            made = uniform(name, geometry, mode, prefixes, count, step=step, tree=tree, seed=seed)
        if common := self._common_pages(dice, prefixes):
            made = made.with_common_pages(common)
        elif dice.randrange(2):
            made = made.with_returned_pages("mixed", seed)
        kept = [(n, 0) for n, one in enumerate(made.requests) if n % 5 == 1 and one.live and one.rows]
        return replace(made, name=name, unstored=frozenset(kept)) if Form.ENGINE_SLOTS in self.forms else made

    def _common_pages(self, dice: random.Random, prefixes: Sequence[int]) -> int:
        """Draw the number of pages that requests share with the first one: none in two of three forwards."""
        pages = prefixes[0] // self.attention.page_size
        return dice.randint(1, pages) if pages and not dice.randrange(3) else 0
