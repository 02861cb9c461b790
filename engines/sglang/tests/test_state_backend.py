"""Tests of the choice of a backend for recurrent layers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from draftmark import Recurrence
from draftmark_sglang import state_shapes
from draftmark_sglang.options import Options
from draftmark_sglang.state_shapes import Family


@pytest.fixture(autouse=True)
def chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name be a backend of delta rules, and show the name as its own."""
    served = SimpleNamespace(recurrences=(Recurrence.DELTA,))
    monkeypatch.setattr(state_shapes, "choose", lambda name, device: SimpleNamespace(name=name or device, info=served))


def _name(options: Options, device: str, family: Family, recurrence: Recurrence = Recurrence.DELTA) -> Any:
    found = state_shapes._backend(options, device, family, recurrence)
    return None if found is None else found.name


@pytest.mark.parametrize("family", list(Family))
def test_default_follows_the_attention(family: Family) -> None:
    """The default is the backend of attention; on a GPU only for families that ran there."""
    assert _name(Options(), "cpu", family) == "cpu"
    assert _name(Options("reference"), "cpu", family) == "reference"
    assert _name(Options(), "cuda", family) == ("cuda" if family is Family.GDN else None)


def test_a_named_backend_is_used_on_each_device() -> None:
    """DRAFTMARK_STATE_BACKEND names a backend for any family, or SGLang's own."""
    for device in ("cpu", "cuda"):
        assert _name(Options(state_backend="cuda_triton"), device, Family.KDA) == "cuda_triton"
        assert _name(Options(state_backend="sglang"), device, Family.GDN) is None


def test_default_does_not_run_a_recurrence_that_the_backend_lacks() -> None:
    """SGLang's own backend runs a recurrence that the backend of attention does not serve."""
    assert _name(Options(), "cpu", Family.MAMBA2, Recurrence.DECAY) is None
