"""Registers one function as two behaviour checks: one on the host tier and one on the device tier.

Modules in `checks/` must import without torch. Modules in `harness/` import torch at their top. A check therefore
names a `Fixture`, and the registered check opens that fixture with `harness/fixtures.py` when it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .check import Case, Tier, check
from .fixture import Fixture as Fixture

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest

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
