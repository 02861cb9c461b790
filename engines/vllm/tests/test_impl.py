"""What a layer does with what it is told late; needs vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from draftmark import AttentionShape
from draftmark_vllm.impl import DraftmarkImpl

SHAPE = AttentionShape(4, 2, 32, 16, "float32", "float32", softmax_scale=0.25)
ROWS = torch.ones(3, 4, 32)


def asked_of_the_backend(scale: float, reads_from: str | None = None) -> dict[str, Any]:
    """What the layer asks of its backend in a step, by operation: keys, or queries."""
    asked: dict[str, Any] = {}
    backend = SimpleNamespace(
        write_kv=lambda k, *rest: asked.update(write_kv=k), attend=lambda q, *rest: asked.update(attend=q)
    )
    layer = SimpleNamespace(kv_sharing_target_layer_name=reads_from)
    made = SimpleNamespace(scale=scale, _shape=SHAPE, _view=lambda layer, pages: None)
    step = SimpleNamespace(parts=((0, SimpleNamespace(num_rows=3), {SHAPE: backend}),))
    DraftmarkImpl.forward(made, layer, ROWS, ROWS, ROWS, ROWS, step, ROWS.clone())
    return asked


@pytest.mark.parametrize(("scale", "factor"), [(0.25, 1.0), (0.5, 2.0)])
def test_a_scale_that_is_told_late_counts(scale: float, factor: float) -> None:
    """Models of transformers, to vLLM 0.29, set it as they call the layer, behind the making of its backend."""
    assert torch.equal(asked_of_the_backend(scale)["attend"], factor * ROWS)


def test_a_layer_that_is_told_late_whose_kv_it_reads_stores_none() -> None:
    """Gemma 4's assistant: to vLLM 0.30 its keys are uninitialized memory, and there are none since."""
    assert set(asked_of_the_backend(0.25)) == {"write_kv", "attend"}
    assert set(asked_of_the_backend(0.25, "model.layers.2.self_attn.attn")) == {"attend"}
