"""Registers a behaviour check on the host tier and, as it is, on the device tier.

Modules of checks are imported where torch may be absent; what they need of it is in `harness/`, whose modules import it
at their top. The one way from a check to the harness is `Given`: the registered check opens what its rule asks for
(`harness/setups.py`) and hands it over.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .check import Case, Tier, check

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest


class Given(StrEnum):
    """What a check of behaviour is handed, and the value that its case holds for it."""

    FORWARD = "forward"
    """``(Harness, ForwardCase)`` of a ForwardCase: opened with its pool, padded requests on the null pages."""
    METADATA = "metadata"
    """The same with a pool of one page, for rules that run no kernel."""
    FORWARDS = "forwards"
    """``(Harness, list of ForwardCase)`` of a list of them, all of one geometry."""
    GEOMETRY = "geometry"
    """``(Harness, Geometry)`` of a geometry, with a pool for any of its forwards."""
    PAIR = "pair"
    """``(Harness, Harness)`` of two geometries."""
    FAR = "far"
    """As FORWARD, on a pool of billions of elements of which a few pages are ever touched."""
    GRAPHS = "graphs"
    """``(GraphHarness, Geometry)`` of a geometry."""
    PROGRAM = "program"
    """``(GraphHarness, Program)`` of a geometry and a program."""
    LATE = "late"
    """``(LateHarness, Geometry)`` of a geometry, with a pool for the rounds of `cases.late_rounds`."""
    LAYERS = "layers"
    """``(LayerHarness, list of ForwardCase)`` of a tuple of geometries, one per shape of layer, and forwards."""
    TREES = "trees"
    """``(TreeHarness, Geometry)`` of a geometry."""
    FAR_TREES = "far_trees"
    """The same, compacting a pool of billions of elements."""
    SUBJECT = "subject"
    """``(BackendUnderTest, value)``: nothing is opened."""


Run = Callable[..., None]
"""A check's body: of the two things that its `Given` says."""


Registered = Callable[["BackendUnderTest", Any], None]


def behaviour(
    given: Given, *, cases: Callable[[], Sequence[Case]], since: tuple[int, int] = (1, 0), bugs: Sequence[str] = ()
) -> Callable[[Run], Registered]:
    """`check` on both tiers: ``module.name`` on the host, ``module.name_on_device`` on the device.

    The module's name then stands for the registered check, a function of ``(subject, value)``.
    """

    def register(run: Run) -> Registered:
        on_host, on_device = _opening(given, run), _opening(given, run)
        on_device.__name__ = f"{run.__name__}_on_device"
        check(tier=Tier.DEVICE, cases=cases, since=since, bugs=bugs)(on_device)
        return check(tier=Tier.HOST, cases=cases, since=since, bugs=bugs)(on_host)

    return register


def on_device_only(
    given: Given, *, cases: Callable[[], Sequence[Case]], since: tuple[int, int] = (1, 0), bugs: Sequence[str] = ()
) -> Callable[[Run], Registered]:
    """`check` on the device tier alone, for what no host can afford."""
    return lambda run: check(tier=Tier.DEVICE, cases=cases, since=since, bugs=bugs)(_opening(given, run))


def _opening(given: Given, run: Run) -> Registered:
    @functools.wraps(run)
    def on_subject(subject: BackendUnderTest, value: Any) -> None:
        from .harness.setups import run_on

        run_on(given, run, subject, value)

    return on_subject
