"""Checks of sizes and claims for latent layers and narrow values: buffers follow rows, heads and the value width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from draftmark.geometry import Geometry

from ..check import SIZES, ContractViolation, Tier, check
from ..sizing import latent as geometries
from ..sizing.batches import brief
from . import overflow, tightness
from .sizing import assert_covered

if TYPE_CHECKING:
    from ..backend_under_test import BackendUnderTest

BUGS = ("vllm#27368", "sglang#11012", "vllm#44044", "vllm#45227", "flashinfer#5170")


@check(tier=Tier.SIZING, needs=SIZES, cases=geometries.served, since=geometries.SINCE, bugs=BUGS)
def covers(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Every declared extent is large enough for the rows and heads of every batch, and for the width of its values."""
    subject.require(geometry)
    assert_covered(subject, subject.fit(geometry), quick=True)


@check(tier=Tier.SIZING, needs=SIZES, cases=geometries.tight, since=geometries.SINCE, bugs=("aiter#5559",))
def is_tight(subject: BackendUnderTest, geometry: Geometry) -> None:
    """No buffer is larger than rows, heads and the width of the values need."""
    tightness.index_buffers(subject, geometry)
    tightness.own_buffers(subject, geometry)


@check(tier=Tier.SIZING, needs=SIZES, cases=geometries.huge, since=geometries.SINCE, bugs=("vllm#47671",))
def values_fit(subject: BackendUnderTest, geometry: Geometry) -> None:
    """Slots, page ids and sums fit the integer type of their buffer, or the geometry is refused."""
    overflow.values_fit(subject, geometry)


@check(tier=Tier.SIZING, needs=SIZES, cases=geometries.claims, since=geometries.SINCE)
def claims_are_served(subject: BackendUnderTest, geometry: Geometry) -> None:
    """A backend serves what BackendInfo claims of latent rows, their two buffers, engine stores and narrow values.

    Some shape must be served on some device, in one buffer or in two.
    """
    info, a = subject.backend.info, geometry.attention
    claimed = (info.latent if a.latent else info.narrow_values) and set(geometry.forms) <= set(info.forms)
    served = any(not subject.backend.supports(one) for one in geometries.ways_to_serve(geometry, subject.profile))
    if claimed and not served:
        raise ContractViolation(
            "latent rows or narrow values that BackendInfo claims are refused for every shape that the suite has",
            batch=brief(geometry),
            got=subject.backend.supports(subject.fit(geometry)),
            expected="some geometry with it is served, on this device or another one",
            formula="BackendInfo.latent, narrow_values and forms",
            remedy="claim only what is served: engines plan by these claims",
        )
    if not claimed:
        subject.require(geometry)
