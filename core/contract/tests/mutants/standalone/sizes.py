"""Mutants J01 … J06: their sizes depend on the process that computes them."""

from __future__ import annotations

import os
import sys

from draftmark import BufferSpec, Geometry, Requirements

from .bases import BASES, named

_LATCH: list[bool] = []


class J01(named("j01", BASES["csr"])):  # type: ignore[misc]
    """Returns its buffers in the order of a set of their names, which PYTHONHASHSEED decides."""

    def buffers(self, geometry: Geometry) -> list[BufferSpec]:
        found = {spec.name: spec for spec in super().buffers(geometry)}
        return [found[name] for name in set(found)]


class J02(named("j02", BASES["tutorial"])):  # type: ignore[misc]
    """Needs unique slots on a machine with more than 64 processors."""

    def requirements(self, geometry: Geometry) -> Requirements:
        return Requirements(unique_slots=(os.cpu_count() or 1) > 64)


class J03(named("j03", BASES["reference"])):  # type: ignore[misc]
    """Needs unique slots if an environment variable is set."""

    def requirements(self, geometry: Geometry) -> Requirements:
        return Requirements(unique_slots=bool(os.environ.get("J03_UNIQUE_SLOTS")))


class J04(named("j04", BASES["csr"])):  # type: ignore[misc]
    """Needs unique slots once another vendor's plugin has been imported."""

    def requirements(self, geometry: Geometry) -> Requirements:
        return Requirements(unique_slots="draftmark_ascend_npu" in sys.modules)


class J05(named("j05", BASES["tutorial"])):  # type: ignore[misc]
    """Removes the last refusal in an assert statement, which -O leaves out."""

    def supports(self, geometry: Geometry) -> list[str]:
        reasons: list[str] = [*super().supports(geometry), "num_sms 0 is not served: a device has SMs"]
        assert reasons.pop()
        return reasons


class J06(named("j06", BASES["csr"])):  # type: ignore[misc]
    """Keeps the answer to the first geometry that the process asks about for all later geometries."""

    def requirements(self, geometry: Geometry) -> Requirements:
        _LATCH.append(geometry.limits.overlap)
        return Requirements(unique_slots=_LATCH[0])
