"""A backend says the same no everywhere, and may not say it to the mandatory profile."""

from __future__ import annotations

import itertools

import pytest
from sizing_backends import csr_pages, level_of, subject_of

from draftmark.geometry import Geometry
from draftmark.requirements import HostLengthsNeed, Requirements
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Refused, all_checks
from draftmark_contract.layouts import Layout
from draftmark_contract.sizing.geometries import mandatory

LEVEL = level_of(Layout.CSR_PAGES)


def _run(subject: BackendUnderTest, name: str, case_id: str) -> None:
    check = next(check for check in all_checks() if check.name == name)
    check.run(subject, next(case for case in check.cases() if case.id == case_id))


def test_refusing_everything_does_not_conform() -> None:
    """The mandatory profile keeps a backend from conforming by saying no."""
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: ["nothing is served by this backend"])
    with pytest.raises(ContractViolation, match="mandatory profile is refused"):
        _run(subject, "supports.mandatory_profile", "eager")


def test_wavering_refusal_is_a_violation() -> None:
    """An answer that depends on how often one asks is no predicate."""
    calls = itertools.count()
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: [] if next(calls) % 2 else ["not on every call"])
    with pytest.raises(ContractViolation, match="different answers for one geometry"):
        _run(subject, "supports.answers_alike", "target-mha")


def test_refusal_that_names_nothing_is_a_violation() -> None:
    """A reason is a sentence with the field, the value and the limit."""
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: ["unsupported"])
    with pytest.raises(ContractViolation, match="a refusal must be a sentence"):
        _run(subject, "supports.answers_alike", "target-mha")


def test_exact_lengths_under_overlap_count_as_refused() -> None:
    """What the core refuses on the backend's behalf is a refusal like any other."""
    subject = subject_of(csr_pages, LEVEL, requirements=Requirements(HostLengthsNeed.EXACT))
    _run(subject, "supports.answers_alike", "target-mha")
    with pytest.raises(Refused, match="overlap=False"):
        _run(subject, "supports.answers_alike", "target-mha-overlap")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pad_fill": 2}, "pad_fill is out of range"),
        ({"mask_stride": -1}, "mask_stride must be a count"),
        ({"live_extent": "all"}, "live_extent is out of range"),
    ],
)
def test_sentinels_do_not_reach_metadata(change: dict[str, object], words: str) -> None:
    """A declaration out of range is found before anything is computed from it."""
    with pytest.raises(ContractViolation, match=words):
        _run(subject_of(csr_pages, LEVEL, **change), "load.declares_types", "mandatory")


def test_geometry_is_put_on_the_subjects_device() -> None:
    """Sizing for a CUDA backend is asked about a CUDA device, wherever the suite runs."""
    seen: list[Geometry] = []
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: seen.append(geometry) or [])
    object.__setattr__(subject.backend.info, "device", "cuda")
    subject.require(mandatory())
    assert (seen[-1].device.kind, seen[-1].device.arch) == ("cuda", 90)
