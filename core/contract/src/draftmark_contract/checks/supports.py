"""Checks of supports(): it gives one answer at every entry, and accepts the mandatory profile."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from draftmark.geometry import DraftShape, Form, Geometry, Limits, Mode
from draftmark.registry import available

from ..behaviour import Fixture, behaviour
from ..check import Case, ContractViolation, Refused, Tier, check
from ..sizing.batches import brief
from ..sizing.claims import claim, ways_to_serve
from ..sizing.geometries import MANDATORY, mandatory, odd_geometries

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest


def _profiles() -> Sequence[Case]:
    limits = {
        "small": Limits(1, 1, 1),
        "eager": Limits(8, 4096, 512),
        "captured": Limits(8, 4096, 512, (1, 2, 4, 8)),
        "padded": Limits(5, 1000, 100, (8,)),
        "large": Limits(256, 131072, 8192, (8, 256)),
    }
    return [
        Case(name, Geometry.create(MANDATORY, one, DraftShape(), modes=(Mode.EXTEND, Mode.DECODE)))
        for name, one in limits.items()
    ]


@check(tier=Tier.SIZING, cases=_profiles)
def mandatory_profile(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every backend serves EXTEND and DECODE in bf16 with 8/2 heads of 128 and pages of 128.

    This mandatory profile has no window, no soft cap and no speculation (D=1).
    """
    reasons = subject.backend.supports(subject.fit(geometry))
    if reasons:
        raise ContractViolation(
            "the mandatory profile is refused",
            batch=brief(geometry),
            got=reasons,
            expected="no reasons",
            formula="supports(geometry)",
            remedy="serve EXTEND and DECODE with bf16, 8/2 heads, head_dim 128, page size 128, no window, no cap, D=1",
        )
    _answers(subject, subject.fit(geometry))


@check(tier=Tier.SIZING, cases=odd_geometries, bugs=("sglang#32920", "sglang#35932"))
def answers_alike(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A backend either refuses a geometry alike at every entry, in sentences, or returns its buffers and metadata."""
    geometry = subject.fit(geometry)
    _same_answer(subject, geometry)
    try:
        subject.require(geometry)
    except Refused as refusal:
        _sentences(refusal.reasons, geometry)
        raise
    _answers(subject, geometry)


@behaviour(Fixture.SUBJECT, cases=odd_geometries, bugs=("sglang#32920",))
def opens_what_it_supports(subject: BackendUnderTest, geometry: Geometry) -> None:
    """open_backend() opens every geometry that supports() accepts, and no entry opens a geometry that it refuses."""
    subject.open(geometry)


def _claims() -> Sequence[Case]:
    """Return one case for every mode, every form, and sinks. Each case has the mandatory attention shape and EXTEND."""
    modes = {mode.value: (tuple(dict.fromkeys((Mode.EXTEND, mode))), ()) for mode in Mode}
    forms = {form.value: ((Mode.EXTEND,), (form,)) for form in Form}
    sinks = Case("sinks", claim(replace(MANDATORY, sinks=True), (Mode.EXTEND,)), (1, 4))
    return [*(Case(name, claim(MANDATORY, *what), (1, 3)) for name, what in (modes | forms).items()), sinks]


@check(tier=Tier.SIZING, cases=_claims, since=(1, 3))
def claims_are_served(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every mode, form and sink support that BackendInfo claims is served for at least one shape on some device."""
    info = subject.backend.info
    claimed = set(geometry.modes) <= set(info.modes) and set(geometry.forms) <= set(info.forms)
    claimed = claimed and geometry.attention.sinks <= info.sinks
    if claimed and not any(not subject.backend.supports(one) for one in ways_to_serve(geometry, subject.profile)):
        raise ContractViolation(
            "a mode or form that BackendInfo claims, or its sinks, is refused for every shape that the suite has",
            batch=brief(geometry),
            got=subject.backend.supports(subject.fit(geometry)),
            expected="some geometry with it is served, on this device or another one",
            formula="BackendInfo.modes, BackendInfo.forms and BackendInfo.sinks",
            remedy="claim only what is served: engines plan by these claims",
        )
    subject.require(geometry)


_ELSEWHERE = """
import json, sys
from dataclasses import replace
from draftmark import load
from draftmark.geometry import DeviceProfile
from draftmark_contract.sizing.geometries import odd_geometries
backend, device = load(sys.argv[1]), DeviceProfile(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
print(json.dumps([backend.supports(replace(case.value, device=device)) for case in odd_geometries()]))
"""


def _once() -> Sequence[Case]:
    return [Case("odd-geometries", None)]


@behaviour(Fixture.SUBJECT, cases=_once, since=(1, 3), bugs=("sglang#32920",))
def answers_alike_elsewhere(subject: BackendUnderTest, _: None) -> None:
    """supports() gives the same answers in a fresh process without torch and the backend's runtime."""
    if subject.backend.name not in {row.name for row in available()}:
        return  # A fresh process cannot load a backend object that a test registered, so there is nothing to compare.
    subject.open(mandatory())
    cases, device = odd_geometries(), subject.profile
    command = [sys.executable, "-c", _ELSEWHERE, subject.backend.name]
    command += [device.kind, str(device.arch), str(device.num_sms)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = json.loads(done.stdout.rpartition("\n")[0].rpartition("\n")[2])
    for case, there in zip(cases, answers, strict=True):
        here = subject.backend.supports(subject.fit(case.value))
        if here != there:
            raise ContractViolation(
                "supports() answers differently in a process without torch and the backend's runtime",
                batch=brief(case.value),
                got=f"{there} there",
                expected=f"{here}, as here",
                formula="supports(geometry)",
                remedy="decide by the geometry only, so that a size computed on a laptop is right on the device",
            )


def _same_answer(subject: BackendUnderTest, geometry: Geometry) -> None:
    first = subject.backend.supports(geometry)
    answers = [subject.backend.supports(replace(geometry))]
    # Call supports() for another geometry first: an answer must not depend on earlier calls.
    subject.backend.supports(subject.fit(mandatory()))
    answers.append(subject.backend.supports(replace(geometry)))
    if answers != [first, first]:
        raise ContractViolation(
            "supports() gives different answers for one geometry",
            batch=brief(geometry),
            got=answers,
            expected=first,
            formula="supports(geometry)",
            bug="sglang#31198",
            remedy="keep no state in the hooks, and let the answer depend on the geometry only",
        )


def _sentences(reasons: tuple[str, ...], geometry: Geometry) -> None:
    short = [reason for reason in reasons if len(reason.split()) < 4]
    if short:
        raise ContractViolation(
            "a refusal must be a sentence that names the field, its value and the limit",
            batch=brief(geometry),
            got=short,
            expected='such as "page_size 3 is not served: the kernel takes 16, 32 or 64"',
            formula="supports(geometry)",
        )


def _answers(subject: BackendUnderTest, geometry: Geometry) -> None:
    subject.backend.buffers(geometry)
    subject.layouts(geometry)
