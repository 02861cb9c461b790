"""Tests of the failure text for a backend that ignores a field of the geometry, such as softmax_scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from draftmark import Geometry, LoadedBackend
from draftmark.runtime import Arena, AttentionBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.geometries import all_shapes, describe
from draftmark_contract.check import Tier
from draftmark_contract.runner.item import all_items, run_item
from draftmark_contract.runner.outcome import Outcome
from draftmark_contract.sizing.batches import brief
from draftmark_reference import ReferencePlugin

TWINS = next(item for item in all_items() if item.id == "memory.of_geometries_that_differ_is_apart[scale]")


class DefaultScale(ReferencePlugin):
    """Reference backend that computes with softmax_scale head_dim ** -0.5 for every geometry."""

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Open the reference backend with the default softmax scale."""
        backend: Any = super().open_backend(geometry, arena)
        attention = replace(geometry.attention, softmax_scale=geometry.attention.head_dim**-0.5)
        backend.geometry = replace(geometry, attention=attention)
        return backend


def test_ignored_scale_is_not_blamed_on_memory() -> None:
    """If a backend ignores softmax_scale, the failure names output and scale and does not blame another geometry."""
    subject = BackendUnderTest(LoadedBackend("reference", DefaultScale()), "cpu", Tier.HOST)
    found = run_item(TWINS, subject, [])
    assert found.outcome is Outcome.FAILED
    assert "before another geometry is used" in found.message and "scale=0.3" in found.message
    assert "next to a geometry that differs" not in found.message


def test_printed_geometries_contain_the_scale() -> None:
    """The long and the short text of a geometry both contain its softmax scale."""
    geometry = all_shapes()[0].geometry
    scaled = replace(geometry, attention=replace(geometry.attention, softmax_scale=0.05))
    assert "scale=0.05" in describe(scaled) and "scale=0.05" in brief(scaled)
