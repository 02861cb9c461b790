"""Layers with recurrent state are refused: the documented operator's dtypes and order of rows do not fit the form."""

from __future__ import annotations

import pytest
import torch

from draftmark import DraftShape, Gate, Limits, LoadedBackend, Mode, Recurrence, StateGeometry, StateShape
from draftmark.registry import load
from draftmark_ascend_npu.state_support import DTYPE, MAX_ROWS, state_reasons
from draftmark_reference import ReferencePlugin, Rollback

DELTA = StateShape(Recurrence.DELTA, Gate.HEAD, 4, 2, 16, 32, 0, 0, DTYPE, DTYPE)
"""The shape that fits the operator best: a gate a head, no convolution, bfloat16 only."""
CASES = {
    "best": ({}, {}, "β as float32 is not served"),
    "float32 state": ({"state_dtype": "float32"}, {}, "state_dtype float32 is not served"),
    "float16 rows": ({"dtype": "float16"}, {}, "dtype float16 is not served"),
    "KDA": ({"gate": Gate.KEY}, {}, "gate key is not served"),
    "convolution": ({"conv_channels": 64, "conv_kernel": 4}, {}, "conv_kernel 4 is not served"),
    "wide head": ({"key_dim": 512}, {}, "4 heads of 32 x 512 are not served"),
    "Mamba2": ({"recurrence": Recurrence.DECAY}, {}, "recurrence decay is not served on an NPU"),
    "tree": ({}, {"topk": 2}, "topk 2 is not served with recurrent state"),
    "long chain": ({}, {"num_draft_tokens": MAX_ROWS + 1}, f"num_draft_tokens {MAX_ROWS + 1} is not served"),
}


def geometry_of(shape: dict, draft: dict) -> StateGeometry:
    from dataclasses import replace

    drafts = replace(DraftShape(1, 1, MAX_ROWS), **draft)
    return StateGeometry.create(replace(DELTA, **shape), Limits(4, 256, 64), drafts, modes=(Mode.EXTEND, Mode.VERIFY))


@pytest.mark.parametrize("name", CASES)
def test_each_reason_is_one_sentence_that_names_the_value(name):
    """The refusal names what the operator does not take, with the value; the core's own sentence comes first."""
    shape, draft, words = CASES[name]
    geometry = geometry_of(shape, draft)
    reasons = load("ascend_npu").state_supports(geometry)
    assert "it is not in BackendInfo.recurrences" in reasons[0]
    assert sum(reason.startswith(words) for reason in reasons) == 1, reasons
    assert len(reasons) == 1 + len(state_reasons(geometry)) == (2 if name in ("best", "Mamba2") else 3)
    assert all(reason.count(". ") == 0 and not reason.endswith(".") for reason in reasons)


class Rounded(ReferencePlugin):
    """The reference with β rounded as the operator takes it."""

    def open_state(self, geometry, arena):
        """Return the reference's backend, which gets a rounded β."""
        backend = super().open_state(geometry, arena)
        right = backend.recur

        def recur(q, k, v, log_decay, beta, *rest):
            right(q, k, v, log_decay, beta if beta is None else beta.to(torch.bfloat16).to(beta.dtype), *rest)

        backend.recur = recur
        return backend


@pytest.mark.parametrize(("plugin", "outcome"), [(ReferencePlugin, "passed"), (Rounded, "failed")])
def test_the_operators_beta_is_outside_the_contracts_bounds(plugin, outcome):
    """A backend that rounds only β to bfloat16 fails the contract's item of bfloat16 rows, states and windows."""
    from draftmark_contract.backend_under_test import BackendUnderTest
    from draftmark_contract.check import Tier
    from draftmark_contract.runner.item import all_items, run_item

    name = "state.dtype_is_read_as_written"
    items = {one.id: one for one in all_items((Tier.HOST,), names=(name,))}
    subject = BackendUnderTest(LoadedBackend("reference", plugin(Rollback.SNAPSHOTS)), "cpu", Tier.HOST)
    result = run_item(items[f"{name}[gdn-bfloat16-bfloat16-bfloat16]"], subject, [])
    assert result.outcome == outcome, result.message
