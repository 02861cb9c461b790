"""Builds the symbolic geometry and batch of the theorems, and converts them to plain integers.

Per-request lemma: a sum over R requests is at most R times its largest term. A batch of R requests equal to the
largest one is within the limits. So a claim about every batch follows from the claim about batches of R equal requests.
In a ragged EXTEND batch there are at most min(R, rows) live requests. Let each have a prefix of length L and n new
tokens. Terms in the sum L + n are largest with n = 1, and terms in n only are bounded by the rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import z3

from draftmark.geometry import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode, minimum
from draftmark_contract.oracle.formulas import draft_steps, max_prefix, max_requests, rows_and_tail
from draftmark_contract.sizing.batches import BatchShape, Group

from .symbols import Context

HEADS = AttentionShape(8, 2, 128, 1)
LATENT = AttentionShape(8, 1, 576, 1, softmax_scale=192**-0.5, value_dim=512, latent=True)
CAPTURES = 3
DRAFTS = ("k", "S", "D")
INPUTS = ("P", *DRAFTS, "max_num_reqs", "C", "max_extend_tokens", *(f"capture{i}" for i in range(CAPTURES)))
"""Names of the free integers of a geometry."""


@dataclass(frozen=True)
class Variant:
    """Enumerated part of the domain: modes, overlap (device lengths may be ahead of the host's), and latent rows."""

    name: str
    modes: tuple[Mode, ...]
    overlap: bool
    latent: bool = False

    def __str__(self) -> str:
        return f"{self.name}{', latent' * self.latent}, {'overlap' if self.overlap else 'no overlap'}"

    @property
    def heads(self) -> AttentionShape:
        """Attention shape, except the page size."""
        return LATENT if self.latent else HEADS


def symbolic_geometry(variant: Variant, device: DeviceProfile, context: Context) -> Geometry:
    """Return a geometry of free integers >= 1, with concrete heads, dtypes, modes and overlap."""

    def free(name: str, low: int) -> Any:
        return context.variable(name, low)

    captures = tuple(free(f"capture{i}", 1) for i in range(CAPTURES))
    heads = variant.heads
    attention = replace(heads, page_size=free("P", 1), softmax_scale=heads.softmax_scale or heads.head_dim**-0.5)
    draft = DraftShape(free("k", 1), free("S", 1), free("D", 1))
    limits = Limits(free("max_num_reqs", 1), free("C", 1), free("max_extend_tokens", 1), captures, variant.overlap)
    return Geometry(attention, draft, limits, device, variant.modes)


def symbolic_batch(geometry: Geometry, mode: Mode, context: Context) -> BatchShape:
    """Return a symbolic batch of this mode within the limits, in the form that the per-request lemma allows."""
    requests, prefix = context.variable("R", 1), context.variable("L", 0)
    context.assume(requests <= max_requests(geometry))
    if mode is Mode.EXTEND:
        return _symbolic_extend(geometry, requests, prefix, context)
    context.assume(prefix <= max_prefix(geometry))
    step: Any = 0
    if mode is Mode.DRAFT:
        step = context.variable("step", 0)
        context.assume(step <= draft_steps(geometry) - 1)
    rows, tail = rows_and_tail(geometry, mode, step)
    return BatchShape(mode, step, (Group(requests, prefix, rows, tail),))


def _symbolic_extend(geometry: Geometry, requests: Any, prefix: Any, context: Context) -> BatchShape:
    new: Any = context.variable("n", 1)
    rows: Any = context.variable("rows", 1)
    context.assume(prefix + new <= geometry.limits.max_context_len)
    context.assume(rows <= geometry.limits.max_extend_tokens)
    context.assume(new <= rows)
    live = minimum(requests, rows)
    return BatchShape(Mode.EXTEND, 0, (Group(live, prefix, new, new),), requests, rows)


def plain_geometry(variant: Variant, device: DeviceProfile, model: dict[str, int]) -> Geometry:
    """Return the geometry that a z3 model describes, validated like the geometry of an engine."""
    return Geometry.create(
        replace(variant.heads, page_size=model["P"]),
        Limits(
            model["max_num_reqs"],
            model["C"],
            model["max_extend_tokens"],
            tuple(model[f"capture{i}"] for i in range(CAPTURES)),
            variant.overlap,
        ),
        DraftShape(model["k"], model["S"], model["D"]),
        device,
        variant.modes,
    )


def plain_batch(geometry: Geometry, mode: Mode, model: dict[str, int]) -> BatchShape:
    """Return the batch that a z3 model describes."""
    requests, prefix = model["R"], model["L"]
    if mode is Mode.EXTEND:
        live, new = min(requests, model["rows"]), model["n"]
        # Keep the total length of a request and give it one new token, so that all live requests fit in the rows.
        if live * new > model["rows"]:
            prefix, new = prefix + new - 1, 1
        return BatchShape(mode, 0, (Group(live, prefix, new, new),), requests, model["rows"])
    step = model.get("step", 0)
    rows, tail = rows_and_tail(geometry, mode, step)
    return BatchShape(mode, step, (Group(requests, prefix, rows, tail),))


def bounded(context: Context, bound: int) -> list[Any]:
    """Return constraints that limit every input to `bound`: small counterexamples are easier to read."""
    return [variable <= bound for variable in context.inputs.values()]


def fixed(context: Context, values: dict[str, int]) -> list[Any]:
    """Return constraints that set some inputs to given values."""
    return [context.inputs[name] == z3.IntVal(value) for name, value in values.items()]
