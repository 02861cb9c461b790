"""Checks of supports(): one answer at every entry and in every process, and it accepts the mandatory profile."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from draftmark.geometry import LAYOUT_FORMS, DraftShape, Geometry, Limits, Mode

from ..behaviour import Fixture, behaviour
from ..check import Case, ContractViolation, Refused, Tier, check
from ..profiles import MANDATORY
from ..sizing.answers import Answers, answers_of, difference, questions
from ..sizing.batches import brief
from ..sizing.claims import claim, ways_to_serve
from ..sizing.elsewhere import KEPT, NoAnswers, Place, RefusedVariables, answers_in, installed
from ..sizing.geometries import mandatory, odd_geometries

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

NUMBERS = ("1", "0", "7", "64")
"""Values to which all variables that a process reads are set at once."""
OTHER_VALUES = ("", "0,1", "auto")
"""Values to which each of these variables is set by itself."""


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
    """Return one case for every mode, every form, sinks and batch invariance, with the mandatory shape and EXTEND."""
    modes = {mode.value: (tuple(dict.fromkeys((Mode.EXTEND, mode))), ()) for mode in Mode}
    forms = {form.value: ((Mode.EXTEND,), (form,)) for form in LAYOUT_FORMS}
    sinks = Case("sinks", claim(replace(MANDATORY, sinks=True), (Mode.EXTEND,)), (1, 4))
    same = claim(MANDATORY, (Mode.EXTEND,))
    same = replace(same, limits=replace(same.limits, batch_invariant=True))
    found = [Case(name, claim(MANDATORY, *what), (1, 3)) for name, what in (modes | forms).items()]
    return [*found, sinks, Case("batch-invariance", same, (1, 5))]


@check(tier=Tier.SIZING, cases=_claims, since=(1, 3))
def claims_are_served(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every mode, form and feature that BackendInfo claims is served for at least one shape on some device."""
    info = subject.backend.info
    claimed = set(geometry.modes) <= set(info.modes) and set(geometry.forms) <= set(info.forms)
    claimed = claimed and geometry.attention.sinks <= info.sinks
    claimed = claimed and geometry.limits.batch_invariant <= info.batch_invariant
    if claimed and not any(not subject.backend.supports(one) for one in ways_to_serve(geometry, subject.profile)):
        raise ContractViolation(
            "a mode, form or feature that BackendInfo claims is refused for every shape that the suite has",
            batch=brief(geometry),
            got=subject.backend.supports(subject.fit(geometry)),
            expected="some geometry with it is served, on this device or another one",
            formula="BackendInfo.modes, forms, sinks and batch_invariant",
            remedy="claim only what is served: engines plan by these claims",
        )
    subject.require(geometry)


def _places() -> Sequence[Case]:
    """Return the processes in which the hooks answer again, as lists of places."""
    since = (1, 5)
    seeds = [Place(f"under PYTHONHASHSEED={seed}", {"PYTHONHASHSEED": str(seed)}) for seed in range(4)]
    machines = [
        Place(
            f"on a machine with another name, memory size, {n} processors and threads",
            {"OMP_NUM_THREADS": str(n)},
            processors=n,
        )
        for n in (1, 384)
    ]
    bare = Place("in an empty environment", {"LC_ALL": "C"}, bare=True)
    order = Place(
        "on a thread, with hooks and geometries in reverse order, under -OO", options=("-OO",), backwards=True
    )
    after = Place("after torch, with 5 threads, and the other backends", imports=("torch", "numpy", "*"), threads=5)
    return [
        Case("odd-geometries", [Place("in a process without torch and the backend's runtime", hooks=())], (1, 3)),
        Case("hash-seeds", seeds, since),
        Case("machines", machines, since),
        Case("environments", [bare], since),
        Case("order", [order], since),
        Case("imports", [after], since),
    ]


@behaviour(Fixture.SUBJECT, cases=_places, since=(1, 3), bugs=("sglang#32920",))
def answers_alike_elsewhere(subject: BackendUnderTest, places: Sequence[Place]) -> None:
    """The sizing hooks and the contract notes give the same answers in every process.

    The processes differ in imported modules, hash seed, processors, memory size, host name, environment variables,
    locale, current folder, optimization, threads, and order of the questions. Every variable that a process reads is
    also set to several numbers, to a list and to a word. A BackendError that names the variable may refuse a number,
    any error a list or a word.
    """
    if not installed(subject.backend.name, subject.backend.plugin):
        return  # Another process cannot load a backend object that a test registered.
    subject.open(mandatory())
    here = answers_of(subject.backend, subject.profile, questions(), places[0].hooks)
    for place in places:
        read = [name for name in _compared(subject, place, here) if name not in KEPT]
        for value in NUMBERS if place.bare else ():
            _compare_with(subject, dict.fromkeys(read, value), here)
        for name, value in product(read, OTHER_VALUES) if place.bare else ():
            with suppress(NoAnswers):
                _compare_with(subject, {name: value}, here)


def _compare_with(subject: BackendUnderTest, given: dict[str, str], here: list[Answers]) -> None:
    """Compare the answers with these variables set, except those that the backend refuses."""
    while given:
        where = f"with the environment variables {', '.join(given)} set to {next(iter(given.values()))}"
        try:
            _compared(subject, Place(where, given, bare=True), here)
            return
        except RefusedVariables as refusal:
            given = {name: value for name, value in given.items() if name not in refusal.names}


def _compared(subject: BackendUnderTest, place: Place, here: list[Answers]) -> list[str]:
    """Compare the answers in a place with those here. Return the environment variables that were read there."""
    found, read = answers_in(place, subject.backend.name, subject.profile)
    for geometry, one, there in zip(questions(), here, found, strict=True):
        differs = difference(one, there)
        if differs:
            where, expected, got = differs
            hook = where.strip(".").partition(".")[0].partition("[")[0] or "supports"
            raise ContractViolation(
                f"{hook}() answers differently {place.where}",
                batch=brief(geometry),
                got=f"{where.strip('.')} = {got!r} there",
                expected=f"{expected!r}, as here",
                formula=f"{hook}(geometry)",
                remedy="decide by the geometry only, so that a size computed on a laptop is right on the device",
            )
    return read


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
