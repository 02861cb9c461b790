"""Registers a behaviour check on the host tier and, as it is, on the device tier."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .check import Case, Tier, check

if TYPE_CHECKING:
    from .backend_under_test import BackendUnderTest

Run = Callable[["BackendUnderTest", Any], None]


def behaviour(
    *, cases: Callable[[], Sequence[Case]], since: tuple[int, int] = (1, 0), bugs: Sequence[str] = ()
) -> Callable[[Run], Run]:
    """`check` on both tiers: ``module.name`` on the host, ``module.name_on_device`` on the device."""

    def register(run: Run) -> Run:
        @functools.wraps(run)
        def on_device(subject: BackendUnderTest, value: Any) -> None:
            run(subject, value)

        on_device.__name__ = f"{run.__name__}_on_device"
        check(tier=Tier.DEVICE, cases=cases, since=since, bugs=bugs)(on_device)
        return check(tier=Tier.HOST, cases=cases, since=since, bugs=bugs)(run)

    return register
