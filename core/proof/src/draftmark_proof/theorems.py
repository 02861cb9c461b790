"""Builds the claims ``needed <= declared`` about a plugin's sizing: one per buffer, mode and extent, over all paths."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import z3

from draftmark.geometry import Geometry, Mode
from draftmark.requirements import HostLengthsNeed
from draftmark_contract.check import ContractViolation
from draftmark_contract.layouts import MetadataSpec
from draftmark_contract.roles import USAGE_ROLES, Buffer, with_roles
from draftmark_contract.sizing.geometries import PROVED
from draftmark_contract.sizing.required_sizes import is_used, required_sizes_of

from .domain import INPUTS, Variant, plain_geometry, symbolic_batch, symbolic_geometry
from .explore import explore
from .symbols import Context, Sym, SymbolicUse

if TYPE_CHECKING:
    from draftmark_contract.backend_under_test import BackendUnderTest

VARIANTS = tuple(
    Variant(name, modes, overlap, latent)
    for latent in (False, True)
    for name, modes in PROVED.items()
    for overlap in (False, True)
)


@dataclass(frozen=True)
class Claim:
    """Part of a theorem for one path: `assumed` and the context's facts must imply every term of `goals`."""

    context: Context
    assumed: list[Any]
    goals: list[Any]


@dataclass
class Theorem:
    """States ``needed <= declared`` for one extent of one buffer in one mode, on every path of the plugin's code.

    Attributes:
        variant, mode, buffer, role: subject of the claim.
        what: name of the extent; ``"divisors"`` for the claim that every divisor is >= 1.
        text: the claim in words.
        claims: one claim per path.
    """

    variant: Variant
    mode: Mode | None
    buffer: str
    role: str
    what: str
    text: str
    claims: list[Claim] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Theorem name, e.g. ``"kv_lens entries, verify"``."""
        return f"{self.buffer} {self.what}" + (f", {self.mode.value}" if self.mode else "")


@dataclass
class Plan:
    """Holds the theorems of one variant, or the reason why it has none.

    Attributes:
        variant: served modes, and overlap.
        theorems: theorems to prove.
        refused: reasons of the backend, if it serves nothing of this variant.
        obstacle: operation in the backend's sizing code that a proof cannot follow.
        swept: buffers with sizes that only usage() can compute. A sweep over edge cases tests them instead of a proof.
    """

    variant: Variant
    theorems: list[Theorem] = field(default_factory=list)
    refused: tuple[str, ...] = ()
    obstacle: str = ""
    swept: tuple[str, ...] = ()


def plan_of(subject: BackendUnderTest, variant: Variant) -> Plan:
    """Run the plugin's supports(), buffers() and metadata declaration on symbols, and return the theorems."""
    try:
        paths = explore(lambda context: _run(subject, variant, context))
    except SymbolicUse as obstacle:
        return Plan(variant, obstacle=str(obstacle))
    served = [path for path in paths if not path.result.reasons]
    if not served:
        return Plan(variant, refused=tuple(paths[0].result.reasons))
    found: dict[tuple[Any, ...], Theorem] = {}
    for path in served:
        for mode in variant.modes:
            _state(found, variant, mode, path.context, path.conditions, path.result)
    swept = tuple(sorted({s.name for path in served for s in path.result.specs if s.role in USAGE_ROLES}))
    return Plan(variant, list(found.values()), swept=swept)


@dataclass
class _Answers:
    geometry: Geometry
    reasons: list[str]
    specs: list[Buffer]
    metadata: dict[Mode, MetadataSpec]


def _run(subject: BackendUnderTest, variant: Variant, context: Context) -> _Answers:
    if variant.latent and not subject.backend.info.latent:
        geometry = plain_geometry(variant, subject.profile, dict.fromkeys(INPUTS, 1))
        return _Answers(geometry, subject.backend.supports(geometry), [], {})
    geometry = symbolic_geometry(variant, subject.profile, context)
    reasons = _hook(subject, "supports", geometry)
    if reasons:
        return _Answers(geometry, reasons, [], {})
    exact = _hook(subject, "requirements", geometry).host_lengths is HostLengthsNeed.EXACT
    if variant.overlap and exact:
        return _Answers(geometry, ["it needs exact host lengths, which overlap cannot give"], [], {})
    metadata = _layouts(subject, geometry)
    return _Answers(
        geometry, [], with_roles(_hook(subject, "buffers", geometry), metadata, subject.notes.roles), metadata
    )


def _hook(subject: BackendUnderTest, name: str, geometry: Geometry) -> Any:
    # Call the hook's implementation directly: Backend.buffers() requires extents that are ints, not symbols.
    try:
        return subject.backend.implementation(name)(geometry=geometry)
    except SymbolicUse:
        raise
    except Exception as error:
        raise SymbolicUse(f"{name}() raised {type(error).__name__} on symbols: {error}") from error


def _layouts(subject: BackendUnderTest, geometry: Geometry) -> dict[Mode, MetadataSpec]:
    try:
        return subject.layouts(geometry)
    except ContractViolation as violation:
        if isinstance(violation.__cause__, SymbolicUse):
            raise violation.__cause__ from violation
        raise SymbolicUse(violation.what) from violation


def _state(
    found: dict[tuple[Any, ...], Theorem],
    variant: Variant,
    mode: Mode,
    context: Context,
    conditions: list[Any],
    answers: _Answers,
) -> None:
    """Add this path's claims about one mode. They use a copy of the path's context: each mode has its own batch."""
    own = context.copy()
    geometry = _rebound(answers.geometry, own)
    batch = symbolic_batch(geometry, mode, own)
    for spec in answers.specs:
        if not is_used(spec, mode, answers.metadata):
            continue
        for need in required_sizes_of(spec, batch, geometry, answers.metadata):
            text = f"{need.why} <= {spec.formula}"
            theorem = Theorem(variant, mode, spec.name, spec.role.value, need.what, text)
            theorem = found.setdefault((mode, spec.name, need.what), theorem)
            theorem.claims.append(Claim(own, conditions, [_at_most(need.needed, need.declared)]))
    if own.obligations():
        theorem = Theorem(variant, mode, "sizing", "", "divisors", "every divisor is >= 1")
        found.setdefault((mode, "", ""), theorem).claims.append(Claim(own, conditions, own.obligations()))


def _at_most(needed: Any, declared: Any) -> Any:
    left, right = (value.term if isinstance(value, Sym) else z3.IntVal(value) for value in (needed, declared))
    return left <= right


def _rebound(geometry: Geometry, context: Context) -> Geometry:
    """Return the symbolic geometry with its future divisions and maxima recorded in `context`."""
    a, d, m = geometry.attention, geometry.draft, geometry.limits

    def sym(value: Any) -> Any:
        return Sym(value.term, context)

    return replace(
        geometry,
        attention=replace(a, page_size=sym(a.page_size)),
        draft=replace(d, topk=sym(d.topk), num_steps=sym(d.num_steps), num_draft_tokens=sym(d.num_draft_tokens)),
        limits=replace(
            m,
            max_num_reqs=sym(m.max_num_reqs),
            max_context_len=sym(m.max_context_len),
            max_extend_tokens=sym(m.max_extend_tokens),
            capture_batch_sizes=tuple(sym(size) for size in m.capture_batch_sizes),
        ),
    )
