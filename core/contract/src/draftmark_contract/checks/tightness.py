"""Checks that no buffer is larger than its batches can ever need. Over-allocation takes memory from KV pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry, Mode

from ..check import SIZES, ContractViolation, Tier, check
from ..layouts import MetadataSpec
from ..oracle.formulas import draft_steps, max_prefix, max_requests, max_tail, rows_and_tail
from ..roles import USAGE_ROLES, Buffer, Role
from ..sizing.batches import BatchShape, Group, brief, limit_batches
from ..sizing.geometries import tight_geometries
from ..sizing.required_sizes import BY_LAYOUT, is_used, required_sizes_of
from ..sizing.usage import judged_own_buffers, usage_of

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

INDEX_FACTOR = 1.02
OWN_FACTOR = 2


@check(tier=Tier.SIZING, needs=SIZES, cases=tight_geometries, bugs=("aiter#3855", "tokenspeed#125", "sglang#24453"))
def index_buffers(subject: BackendUnderTest, geometry: Geometry) -> None:
    """An index buffer has at most 1.02 times the entries that it needs, plus one page or mask word per request."""
    subject.require(geometry)
    geometry = subject.fit(geometry)
    metadata = subject.layouts(geometry)
    specs = subject.buffers(geometry)
    staged = any(spec.role is Role.QUERY_STAGING for spec in specs)
    for spec in specs:
        unsaid = spec.role in BY_LAYOUT and not subject.notes.has_layouts
        if spec.role not in USAGE_ROLES and not unsaid:
            needed, slack = largest_need(spec, geometry, metadata, padded_to_tail=staged)
            _assert_tight(spec, needed, INDEX_FACTOR * needed + slack, geometry)


@check(tier=Tier.SIZING, needs=SIZES, cases=tight_geometries, bugs=("flashinfer#2046", "vllm#40383"))
def own_buffers(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A buffer that only the plugin can size is at most twice as large as the largest usage() of any batch."""
    subject.require(geometry)
    geometry = subject.fit(geometry)
    specs = subject.buffers(geometry)
    own = judged_own_buffers(subject, specs)
    if not own:
        return
    # A batch between the smallest and the largest may need the largest workspace, for example for split-KV partials.
    most = max_requests(geometry)
    counts = tuple(2**n for n in range(1, most.bit_length()) if 2**n < most)
    usages = [usage_of(subject, geometry, batch, specs) for batch in limit_batches(geometry, counts)]
    for spec in own:
        needed = max(used[spec.name] for used in usages)
        if spec.nbytes > OWN_FACTOR * needed:
            _complain(
                spec, f"{spec.nbytes} bytes", f"<= {OWN_FACTOR} x usage() = {OWN_FACTOR * needed} bytes", geometry
            )


def largest_need(
    spec: Buffer, geometry: Geometry, metadata: dict[Mode, MetadataSpec], *, padded_to_tail: bool = False
) -> tuple[int, int]:
    """Return (entries of `spec` that the largest batches need, entries allowed for rounding per request).

    Lengths include the longest tail of any mode, because one request's row may serve every mode. With `padded_to_tail`
    the backend stages its queries, and may pad the rows of each request up to its number of tail slots.
    """
    limits = geometry.limits
    most, longest = max_requests(geometry), max_tail(geometry)
    needed = 0
    for mode in geometry.modes:
        if not is_used(spec, mode, metadata):
            continue
        if mode is Mode.EXTEND:
            live = min(most, limits.max_extend_tokens)
            group = Group(live, limits.max_context_len, 1, 0)
            batch = BatchShape(mode, 0, (group,), most, limits.max_extend_tokens)
            needed = max(needed, _numel(spec, batch, geometry, metadata))
            continue
        step = max(0, draft_steps(geometry) - 1)
        rows_each, _ = rows_and_tail(geometry, mode, step)
        rows_each = max(rows_each, longest) if padded_to_tail else rows_each
        batch = BatchShape(mode, step, (Group(most, max_prefix(geometry), rows_each, longest),))
        needed = max(needed, _numel(spec, batch, geometry, metadata))
    sets = max(1, draft_steps(geometry)) if Mode.DRAFT in geometry.modes and len(spec.shape) > 1 else 1
    by_token = spec.role is Role.KV_INDICES and spec.by_token
    per_request = geometry.attention.page_size if by_token else 1
    if spec.role is Role.TAIL_MASK:
        per_request = max(geometry.draft.num_draft_tokens, geometry.draft.topk)
    return needed * (sets if spec.role in _BY_STEP else 1), most * per_request + 1


_BY_STEP = frozenset({Role.KV_INDPTR, Role.KV_INDICES, Role.KV_LAST_PAGE_LEN, Role.KV_LENS, Role.QO_INDPTR})


def _numel(spec: Buffer, batch: BatchShape, geometry: Geometry, metadata: dict[Mode, MetadataSpec]) -> int:
    needs = {need.what: int(need.needed) for need in required_sizes_of(spec, batch, geometry, metadata)}
    if spec.role is Role.PAGE_TABLE:
        return needs.get("rows", 0) * needs.get("columns", 0)
    if spec.role is Role.TAIL_MASK and "bits of a row" in needs:
        bits = 8 * spec.nbytes // max(1, spec.numel)
        return int(batch.rows * -(-needs["bits of a row"] // bits))
    return max(needs.values(), default=0)


def _assert_tight(spec: Buffer, needed: int, allowed: float, geometry: Geometry) -> None:
    if spec.numel > allowed:
        _complain(spec, f"{spec.numel} entries", f"<= {int(allowed)}: {INDEX_FACTOR} x {needed} and rounding", geometry)


def _complain(spec: Buffer, got: str, expected: str, geometry: Geometry) -> None:
    raise ContractViolation(
        f"buffer {spec.name!r} (role {spec.role.value}) is larger than any batch can need",
        batch=brief(geometry),
        got=f"{got}, declared as {spec.formula!r}",
        expected=expected,
        formula="draftmark_contract.sizing.required_sizes at the largest batch",
        bug="aiter#3855, tokenspeed#125",
        remedy="count pages once (not tokens times pages), and take the extent from Geometry",
    )
