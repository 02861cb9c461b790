"""Tests that the schemes reproduce the published sizes of hybrid models, to the printed digits."""

from __future__ import annotations

import math

import pytest

from draftmark import DraftShape, Limits, StateGeometry
from draftmark_tools.cli.state_arguments import MODELS
from draftmark_tools.cli.state_schemes import SCHEMES, committed_bytes, state_traffic
from draftmark_tools.models import state_facts

BY_NAME = {scheme.name: scheme for scheme in SCHEMES}
HELD = {
    "snapshots": "18.7 37.4 74.8 299 74.0 148 296 1,184",
    "slots": "14.2 34.2 77.5 432 57.0 137 310 1,728",
    "replay-windows": "0.5 1.1 2.2 8.6 2.1 4.3 8.5 34.0",
    "replay": "0.3 0.5 1.0 4.0 1.0 2.0 4.0 16.0",
}
"""GiB of Qwen3-Next at 64 requests and D 4, 8, 16, 64, then at 256 requests."""
MOVED = {
    "snapshots": "31.5 49.5 85.5 302",
    "snapshots-tree": "45.0 81.0 153 585",
    "slots": "22.5 40.5 76.5 293",
    "replay": "13.7 13.9 14.4 16.9",
    "replay-late": "9.2 9.4 9.9 12.4",
    "ring": "6.5 6.6 6.8 8.1",
}
"""GiB that a round of 64 requests moves in Qwen3-Next at D 4, 8, 16, 64, with 3 accepted rows."""


def geometry(model: str, requests: int, nodes: int) -> StateGeometry:
    """Return the recurrent layers of a known model on one rank."""
    facts = state_facts(MODELS[model])
    return StateGeometry.create(
        facts.shape, Limits(requests, 4096), DraftShape(num_draft_tokens=nodes), num_layers=len(facts.layers)
    )


def gib(count: int) -> str:
    """Return GiB with one digit, or none from 100 on; a half is rounded up."""
    size = count / 2**30
    return f"{size:.1f}" if size < 99.95 else f"{math.floor(size + 0.5):,}"


@pytest.mark.parametrize("name", HELD)
def test_bytes_held(name) -> None:
    """Each scheme holds the published bytes."""
    sizes = [geometry("qwen3-next", requests, nodes) for requests in (64, 256) for nodes in (4, 8, 16, 64)]
    assert " ".join(gib(BY_NAME[name].held(one)) for one in sizes) == HELD[name]


@pytest.mark.parametrize("name", MOVED)
def test_bytes_moved(name) -> None:
    """Each scheme moves the published bytes."""
    sizes = [geometry("qwen3-next", 64, nodes) for nodes in (4, 8, 16, 64)]
    assert " ".join(gib(BY_NAME[name].moved(one, 3)) for one in sizes) == MOVED[name]


@pytest.mark.parametrize(
    ("model", "layers", "request_mib", "record", "share", "snapshots", "replay"),
    [
        ("qwen3-next", 36, "73.7", "12.2", "0.60", "37.4 148", "0.5 2.0"),
        ("nemotron-h", 24, "97.4", "18.5", "0.45", "49.5 196", "0.5 1.8"),
        ("kimi-linear", 21, "43.5", "32.1", "1.57", "22.1 87.3", "0.6 2.3"),
    ],
)
def test_known_models(model, layers, request_mib, record, share, snapshots, replay) -> None:
    """Slots, records and two schemes of the three known models have the published sizes."""
    sizes = [geometry(model, requests, 8) for requests in (64, 256)]
    g = sizes[0]
    assert g.num_layers == layers
    assert f"{layers * g.slot_bytes / 2**20:.1f}" == request_mib
    assert f"{g.record_bytes / 1024:.1f}" == record
    assert f"{100 * g.record_bytes / g.state_bytes:.2f}" == share
    assert " ".join(gib(BY_NAME["snapshots"].held(one)) for one in sizes) == snapshots
    assert " ".join(gib(BY_NAME["replay"].held(one)) for one in sizes) == replay


def test_committed_slots_and_traffic() -> None:
    """The committed slots of 64, 128 and 256 requests hold the published bytes, and S is 4.5 GiB."""
    assert [gib(committed_bytes(geometry("qwen3-next", n, 8))) for n in (64, 128, 256)] == ["4.6", "9.2", "18.4"]
    assert gib(state_traffic(geometry("qwen3-next", 64, 8))) == "4.5"
