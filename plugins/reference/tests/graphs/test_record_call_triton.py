"""Triton kernels, in Triton's interpreter, inside a recorded graph."""

# No `from __future__ import annotations` here: Triton needs the annotation of a constexpr as an object.
from typing import Any

import pytest
import torch

from draftmark.errors import CaptureError
from draftmark.graphs import record_call
from draftmark_reference.graphs import RecordedGraph

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


def add_one_body(x_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, name-defined]
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < n) + 1, mask=offsets < n)


@pytest.fixture
def add_one(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the kernel ``out = x + 1``; decorated here, because Triton selects its interpreter at decoration."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return triton.jit(add_one_body)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_launch_replays_through_record_call(add_one: Any, mode: Any) -> None:
    """A launch is recorded as one call, has no effect at capture, and reads current contents at each replay."""
    with mode():
        x, out = torch.arange(6.0), torch.zeros(6)

        def launch(x: torch.Tensor, out: torch.Tensor) -> None:
            add_one[(2,)](x, out, 6, BLOCK=4)

        graph = RecordedGraph(lambda: record_call(launch, x, out, mutates=(out,)))
        assert out.tolist() == [0] * 6
        for factor in (10, 3):
            x.copy_(torch.arange(6.0) * factor)
            graph.replay()
            assert out.tolist() == [factor * i + 1 for i in range(6)]


def test_a_launch_without_record_call_is_refused(add_one: Any) -> None:
    """A launch outside record_call raises an error that names record_call, and writes nothing."""
    x, out = torch.arange(6.0), torch.zeros(6)
    with pytest.raises(CaptureError, match="record_call"):
        RecordedGraph(lambda: add_one[(2,)](x, out, 6, BLOCK=4))
    assert out.tolist() == [0] * 6
