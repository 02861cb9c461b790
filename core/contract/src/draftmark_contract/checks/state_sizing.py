"""Checks of sizes for recurrent state: rows that are not committed have room for every batch, and no more."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftmark.geometry import StateGeometry

from ..check import PROOFS, SIZES, ContractViolation, Tier, check
from ..oracle.formulas import max_requests
from ..roles import Buffer
from ..sizing import state as geometries
from ..sizing.batches import brief
from ..sizing.proofs import proof_of

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


@check(
    tier=Tier.SIZING,
    needs=SIZES,
    cases=geometries.served,
    since=geometries.SINCE,
    bugs=("vllm#47635", "vllm#39809", "vllm#37052", "sglang#19169", "sglang#34096", "vllm#36639"),
)
def covers(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """Buffers hold a value, a key and the channels of every row of the largest verify, in every layer.

    The largest verify is padded to the largest captured size. A RAGGED_VERIFY has the rows of its largest budget.
    """
    specs = _specs(subject, geometry)
    needed = geometry.num_layers * geometries.kept_rows(geometry) * geometries.least_bytes(geometry)
    if geometries.kept_bytes(specs) < needed:
        _fail(
            "the rows of a verify do not fit the buffers that keep them until the commit",
            geometry,
            geometries.kept_bytes(specs),
            f"at least {needed:,} bytes in state_rows and state_records",
            "layers · rows of the largest batch · (value + key + channels)",
        )


@check(
    tier=Tier.SIZING, needs=SIZES, cases=geometries.served, since=geometries.SINCE, bugs=("sglang#34096", "vllm#39809")
)
def grows_with_its_rows(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """Each buffer of uncommitted rows grows with layers, requests and rows: L · R · D of what one row adds."""
    whole = {spec.name: spec for spec in _specs(subject, geometry) if spec.role in geometries.KEPT}
    one, two = (_numels(subject, _single(geometry, rows)) for rows in (1, 2))
    requests, rows = max_requests(geometry), geometry.draft.num_draft_tokens
    if geometries.kept_rows(geometry) < requests * rows:
        return  # Budgets bound the rows of a RAGGED_VERIFY, so a buffer may be smaller than a rectangle.
    for name, spec in whole.items():
        first, second = one.get(name, 0), two.get(name, 0)
        needed = geometry.num_layers * requests * (first + (rows - 1) * (second - first))
        if spec.numel < needed:
            _fail(
                f"buffer {name!r} does not grow with the rows that it keeps",
                geometry,
                f"{spec.numel:,} entries; {first:,} for one layer, request and row, {second:,} for two rows",
                f"at least {needed:,} entries",
                "layers · max_reqs · entries of D rows",
            )


@check(
    tier=Tier.SIZING,
    needs=SIZES,
    cases=geometries.served,
    since=geometries.SINCE,
    bugs=("sglang#23643", "tokenspeed#397", "sglang#39624"),
)
def is_tight(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """Buffers are not larger than a state, a window and a record of every row; without a verify they hold no rows."""
    specs, requests = _specs(subject, geometry), max_requests(geometry)
    rows = requests * geometry.draft.num_draft_tokens if geometries.kept_rows(geometry) else 0
    most = geometry.num_layers * rows * geometries.most_bytes(geometry)
    most += geometries.SLACK + geometries.BY_REQUEST * (requests + rows)
    held = sum(spec.nbytes for spec in specs)
    if held > most:
        _fail(
            "the buffers are larger than the rows of the largest verify need",
            geometry,
            f"{held:,} bytes",
            f"at most {most:,} bytes",
            "layers · max_reqs · D · (state + window + record)" if rows else "no verify, so no rows to keep",
        )


@check(tier=Tier.SIZING, needs=SIZES, cases=geometries.claims, since=geometries.SINCE, bugs=("TRT-LLM#18449",))
def claims_are_served(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """A recurrence in BackendInfo.recurrences is served for some layer on some device; any other is refused.

    The hooks answer by the geometry only: twice the same, and the same reasons at every entry.
    """
    backend = subject.backend
    fitted = subject.fit(geometry)
    claimed = geometry.state.recurrence in backend.info.recurrences
    served = any(not backend.state_supports(one) for one in geometries.ways_to_serve(geometry, subject.profile))
    if claimed and not served:
        _fail(
            "a recurrence that BackendInfo claims is refused for every layer that the suite has",
            geometry,
            backend.state_supports(fitted),
            "some layer with it is served, on this device or another one",
            "BackendInfo.recurrences",
        )
    subject.require(geometry)
    again = [repr((backend.state_supports(fitted), backend.state_buffers(fitted))) for _ in range(2)]
    if again[0] != again[1]:
        _fail("state_supports() or state_buffers() answers differently", geometry, again[1], again[0], "the geometry")


@check(
    tier=Tier.SIZING, needs=PROOFS, cases=geometries.proved, since=geometries.SINCE, bugs=("vllm#47635", "vllm#39809")
)
def largest_batch_covers_all(subject: BackendUnderTest, geometry: StateGeometry) -> None:
    """z3 proves that the buffers of a layer hold the rows of every verify, for any number of layers, rows and requests.

    The proof runs the plugin's own state_buffers() on symbolic integers.
    """
    prover = proof_of("state")
    subject.require(geometry)
    prover.assert_proved(subject, subject.fit(geometry))


def _specs(subject: BackendUnderTest, geometry: StateGeometry) -> list[Buffer]:
    subject.require(geometry)
    return subject.buffers(subject.fit(geometry))


def _single(geometry: StateGeometry, rows: int) -> StateGeometry:
    """Return the geometry with one layer, one request and `rows` rows."""
    limits = replace(geometry.limits, max_num_reqs=1, capture_batch_sizes=(), row_budgets=())
    limits = replace(limits, row_budgets=(rows,) if geometry.limits.row_budgets else ())
    return replace(geometry, limits=limits, draft=replace(geometry.draft, num_draft_tokens=rows), num_layers=1)


def _numels(subject: BackendUnderTest, geometry: StateGeometry) -> dict[str, int]:
    subject.require(geometry)
    return {spec.name: spec.numel for spec in subject.buffers(subject.fit(geometry))}


def _fail(what: str, geometry: StateGeometry, got: Any, expected: Any, formula: str) -> None:
    raise ContractViolation(what, batch=brief(geometry), got=got, expected=expected, formula=formula)
