"""Registers one function as two behaviour checks: one on the host tier and one on the device tier.

Modules in `checks/` must import without torch. Modules in `harness/` import torch at their top. A check therefore
names a `Fixture`, and the registered check opens that fixture with `harness/fixtures.py` when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from .check import Case, Need, Tier, check

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest


class Fixture(StrEnum):
    """Arguments that a behaviour check receives. Each member states the arguments and how the case value gives them."""

    FORWARD = "forward"
    """``(Harness, ForwardCase)`` from a ForwardCase. The pool fits the forward; padded requests use the null pages."""
    METADATA = "metadata"
    """Like FORWARD, but with a pool of one page, for rules that run no kernel."""
    FORWARDS = "forwards"
    """``(Harness, list of ForwardCase)`` from a list of forwards with one geometry."""
    GEOMETRY = "geometry"
    """``(Harness, Geometry)`` from a geometry. The pool fits any forward of that geometry."""
    PAIR = "pair"
    """``(Harness, Harness)`` from two geometries."""
    LARGE_POOL = "large_pool"
    """Like FORWARD, but on a sparse pool of billions of elements. The forward touches only a few pages."""
    GRAPHS = "graphs"
    """``(GraphHarness, Geometry)`` from a geometry."""
    PROGRAM = "program"
    """``(GraphHarness, Program)`` from a geometry and a program."""
    LATE_DEVICE = "late_device"
    """``(LateHarness, Geometry)`` from a geometry. The pool fits the rounds of `cases.late_rounds`."""
    LAYERS = "layers"
    """``(LayerHarness, list of ForwardCase)`` from one geometry per layer shape, and a list of forwards."""
    TREES = "trees"
    """``(TreeHarness, Geometry)`` from a geometry."""
    LARGE_POOL_TREES = "large_pool_trees"
    """Like TREES, but with a KV pool of billions of elements."""
    ROUNDS = "rounds"
    """``(StateHarness, list of Round)`` from rounds over recurrent state on one pool, with one geometry."""
    STATE = "state"
    """``(StateHarness, StateGeometry)`` from a `StateGeometry`. The pool has one request's slot, and a few more."""
    SUBJECT = "subject"
    """``(BackendUnderTest, case value)``. Nothing is opened."""

    @property
    def needs(self) -> tuple[Need, ...]:
        """Abilities of the subject that a check with these arguments uses."""
        if self is Fixture.SUBJECT:
            return (Need.HOOKS,)
        if self is Fixture.METADATA:
            return (Need.METADATA,)
        return (Need.FORWARD, Need.GRAPHS) if self in (Fixture.GRAPHS, Fixture.PROGRAM) else (Need.FORWARD,)


Run = Callable[..., None]
"""Body of a check: takes the two arguments that its `Fixture` lists."""


Registered = Callable[["BackendUnderTest", Any], None]


def behaviour(
    fixture: Fixture, *, cases: Callable[[], Sequence[Case]], since: tuple[int, int] = (1, 0), bugs: Sequence[str] = ()
) -> Callable[[Run], Registered]:
    """Register a check on both tiers: ``module.name`` on the host, ``module.name_on_device`` on the device.

    The decorated name then refers to the registered host check, a function of ``(subject, value)``.
    """

    def register(run: Run) -> Registered:
        on_host, on_device = _opening(fixture, run), _opening(fixture, run)
        on_device.__name__ = f"{run.__name__}_on_device"
        more: dict[str, Any] = {"cases": cases, "since": since, "bugs": bugs, "needs": fixture.needs}
        check(tier=Tier.DEVICE, **more)(on_device)
        return check(tier=Tier.HOST, **more)(on_host)

    return register


def on_device_only(
    fixture: Fixture, *, cases: Callable[[], Sequence[Case]], since: tuple[int, int] = (1, 0), bugs: Sequence[str] = ()
) -> Callable[[Run], Registered]:
    """Register a check on the device tier only, because it is too slow for a host."""
    more: dict[str, Any] = {"cases": cases, "since": since, "bugs": bugs, "needs": fixture.needs}
    return lambda run: check(tier=Tier.DEVICE, **more)(_opening(fixture, run))


def _opening(fixture: Fixture, run: Run) -> Registered:
    @functools.wraps(run)
    def on_subject(subject: BackendUnderTest, value: Any) -> None:
        from .harness.fixtures import run_with_fixture

        run_with_fixture(fixture, run, subject, value)

    return on_subject
