"""Checks that every buffer covers every batch within the limits, at extreme batches and at random geometries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

from ..check import SIZES, Case, ContractViolation, Refused, Tier, TooSmall, check
from ..oracle.formulas import max_prefix
from ..sizing.batches import BatchShape, brief, limit_batches
from ..sizing.geometries import PAGES, PLAIN_MODES, SERVED, Family, families, odd_geometries, since, standing_for
from ..sizing.required_sizes import RequiredSize, is_used, required_sizes_of
from ..sizing.usage import judged_own_buffers, usage_of

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

BUGS = ("sglang#27338", "sglang#22778", "sglang#24587", "sglang#25124", "sglang#29450", "vllm#50065")
ROLE_BUGS = {
    "kv_indices": "sglang#27338, sglang#24587",
    "page_table": "sglang#22778, sglang#19016, sglang#29665",
    "tail_mask": "sglang#29450, sglang#29581",
    "kv_indptr": "sglang#25124, vllm#50065",
    "qo_indptr": "sglang#25124, vllm-ascend#16168",
    "kv_lens": "vllm#41016",
    "slot_mapping": "vllm#50065, sglang#25529",
}


@check(tier=Tier.SIZING, needs=SIZES, cases=families, bugs=BUGS)
def covers(subject: BackendUnderTest, family: Family) -> None:
    """Every declared extent is large enough for the batches at the limits."""
    _each_served(subject, family)


@check(tier=Tier.SIZING, needs=SIZES, cases=odd_geometries, bugs=BUGS)
def covers_shapes(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every declared extent is large enough for other heads, head sizes, dtypes, page sizes, windows and drafts."""
    subject.require(geometry)
    assert_covered(subject, subject.fit(geometry))


def _processors() -> Sequence[Case]:
    return [
        Case(f"{name}-sm{count}", (modes, count), since(name), standing_for(modes))
        for name, modes in SERVED.items()
        for count in (1, 24, 78, 108, 132, 188)
    ]


ARCHS = (80, 89, 90, 100, 120)
"""Compute capabilities, times ten, that sizing is tested with on devices that have one."""
HEADS = ((8, 2, 128), (4, 4, 64), (8, 1, 128), (6, 2, 96), (9, 3, 64), (14, 2, 64), (5, 1, 80), (40, 8, 128))
"""Query heads, KV heads and head sizes of models: MHA, MQA, and groups and counts that are no power of two."""


@check(tier=Tier.SIZING, needs=SIZES, cases=_processors, bugs=("pie#414", "vllm#40383", "TRT-LLM#16319"))
def covers_processors(subject: BackendUnderTest, value: tuple[tuple[Mode, ...], int]) -> None:
    """Every declared extent is large enough on devices with 1 to 188 multiprocessors, for any number of requests."""
    modes, count = value
    draft = DraftShape() if modes == PLAIN_MODES else DraftShape(4, 3, 8)
    geometry = Geometry.create(AttentionShape(8, 2, 128, 128), Limits(5, 4000, 512, (2, 32)), draft, modes=modes)
    subject.require(geometry)
    known = subject.profile
    for arch in sorted({known.arch, *(ARCHS if known.kind == "cuda" else ())}):
        varied = replace(geometry, device=replace(known, num_sms=count, arch=arch))
        if arch == known.arch:
            assert_covered(subject, varied, counts=tuple(range(1, 33)))
        elif not subject.backend.supports(varied):
            assert_covered(subject, varied, quick=True)


def _random_cases() -> Sequence[Case]:
    return [
        Case(f"{name}-{'overlap' if overlap else 'sync'}", (modes, overlap), since(name), standing_for(modes, overlap))
        for name, modes in SERVED.items()
        for overlap in (False, True)
    ]


@check(tier=Tier.SIZING, needs=SIZES, cases=_random_cases, bugs=BUGS)
def covers_random(subject: BackendUnderTest, value: tuple[tuple[Mode, ...], bool]) -> None:
    """Every declared extent is large enough for random geometries.

    Every run draws the same geometries. A failing geometry is shrunk to a small one.
    """
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st

    modes, overlap = value
    served: list[bool] = []

    @settings(max_examples=150, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        *(st.integers(1, 12), st.integers(1, 12), st.integers(1, 70), st.sampled_from(PAGES)),
        *(st.integers(1, 9000), st.integers(1, 40), st.integers(1, 3000)),
        st.tuples(
            *(st.lists(st.integers(1, 48), max_size=3), st.sampled_from(HEADS), st.sampled_from((-1, -1, 0, 200)))
        ),
    )
    def assert_served(k: int, s: int, d: int, page: int, context: int, reqs: int, extend: int, rest: Any) -> None:
        capture, heads, window = rest
        geometry = Geometry.create(
            AttentionShape(heads[0], heads[1], heads[2], page, window_left=window),
            Limits(reqs, context, extend, tuple(capture), overlap),
            DraftShape(k, s, d),
            modes=modes,
        )
        served.append(_served(subject, geometry))

    assert_served()
    if not any(served):
        raise subject.refusal(["no random geometry of these modes is served"])


def _each_served(subject: BackendUnderTest, geometries: Iterable[Geometry]) -> None:
    refusals: list[Refused] = []
    served = 0
    for geometry in geometries:
        try:
            subject.require(geometry)
        except Refused as refusal:
            refusals.append(refusal)
            continue
        served += 1
        assert_covered(subject, subject.fit(geometry), quick=True)
    if not served:
        raise refusals[0]


def _served(subject: BackendUnderTest, geometry: Geometry) -> bool:
    try:
        subject.require(geometry)
    except Refused:
        return False
    assert_covered(subject, subject.fit(geometry))
    return True


def assert_covered(
    subject: BackendUnderTest, geometry: Geometry, counts: tuple[int, ...] = (), quick: bool = False
) -> None:
    """Raise `ContractViolation` for the first extent of the first buffer that is too small for some batch.

    Args:
        counts: adds batches at the context limit with these numbers of requests.
        quick: calls usage() only for the longest and the empty batches, because it may query the vendor's runtime.
    """
    specs = subject.buffers(geometry)
    metadata = subject.layouts(geometry)
    own = judged_own_buffers(subject, specs)
    used_by = {mode: [spec for spec in specs if is_used(spec, mode, metadata)] for mode in geometry.modes}
    for batch in limit_batches(geometry, counts):
        for spec in used_by[batch.mode]:
            for need in required_sizes_of(spec, batch, geometry, metadata):
                _assert_fits(need, batch, geometry, spec.formula, spec.role.value)
        if own and not (quick and 0 < batch.groups[0].prefix < max_prefix(geometry)):
            used = usage_of(subject, geometry, batch, specs)
            for spec in own:
                need = RequiredSize(spec.name, "bytes", used[spec.name], spec.nbytes, "usage(geometry, batch)")
                _assert_fits(need, batch, geometry, spec.formula, spec.role.value)


def _assert_fits(need: RequiredSize, batch: BatchShape, geometry: Geometry, formula: str, role: str) -> None:
    if need.needed <= need.declared:
        return
    raise ContractViolation(
        f"buffer {need.buffer!r} (role {role}) is too small: {need.what}",
        batch=f"{batch}; geometry {brief(geometry)}",
        got=f"{need.declared}, declared as {formula!r}",
        expected=f">= {need.needed}: {need.why}",
        formula="draftmark_contract.sizing.required_sizes against the plugin's buffers()",
        bug=ROLE_BUGS.get(role, ""),
        remedy="take the extent from Geometry (max_reqs, max_pages_per_req, mask_words, max_rows_any)",
        wrong=TooSmall(batch, need.buffer, need.declared, need.needed, need.what),
    )
