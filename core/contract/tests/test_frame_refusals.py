"""Tests of refusals in supports(): they must be consistent, and never cover the mandatory profile."""

from __future__ import annotations

import itertools

import pytest

from draftmark.geometry import Geometry
from draftmark.requirements import HostLengthsNeed, Requirements
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Refused, all_checks
from draftmark_contract.layouts import Layout
from draftmark_contract.sizing.geometries import mandatory
from draftmark_testing.sizing_backends import csr_pages, level_of, subject_of

LEVEL = level_of(Layout.CSR_PAGES)


def _run(subject: BackendUnderTest, name: str, case_id: str) -> None:
    check = next(check for check in all_checks() if check.name == name)
    check.run(subject, next(case for case in check.cases() if case.id == case_id))


def test_refusing_everything_does_not_conform() -> None:
    """A backend that refuses the mandatory profile does not conform."""
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: ["nothing is served by this backend"])
    with pytest.raises(ContractViolation, match="mandatory profile is refused"):
        _run(subject, "supports.mandatory_profile", "eager")


def test_changing_refusal_is_a_violation() -> None:
    """If supports() gives different answers for one geometry, its item fails."""
    calls = itertools.count()
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: [] if next(calls) % 2 else ["not on every call"])
    with pytest.raises(ContractViolation, match="different answers for one geometry"):
        _run(subject, "supports.answers_alike", "target-mha")


def test_vague_refusal_is_a_violation() -> None:
    """If a reason of supports() is not a sentence with the field, the value and the limit, its item fails."""
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: ["unsupported"])
    with pytest.raises(ContractViolation, match="a refusal must be a sentence"):
        _run(subject, "supports.answers_alike", "target-mha")


def test_exact_lengths_with_overlap_are_refused() -> None:
    """If a backend needs exact host lengths, the core refuses geometries with overlap, and their items are refused."""
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
def test_metadata_spec_out_of_range_is_a_violation(change: dict[str, object], words: str) -> None:
    """A metadata specification with a value out of range is found before the value is used."""
    with pytest.raises(ContractViolation, match=words):
        _run(subject_of(csr_pages, LEVEL, **change), "load.declares_types", "mandatory")


def test_geometry_has_the_backends_device() -> None:
    """If a backend is for CUDA, its sizing gets geometries of a CUDA device, even on a machine without one."""
    seen: list[Geometry] = []
    subject = subject_of(csr_pages, LEVEL, supports=lambda geometry: seen.append(geometry) or [])
    object.__setattr__(subject.backend.info, "device", "cuda")
    subject.require(mandatory())
    assert (seen[-1].device.kind, seen[-1].device.arch) == ("cuda", 90)
