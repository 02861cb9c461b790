"""Tests of helpers of the checks: detection of host reads, search for storages, and tolerances of outputs."""

from __future__ import annotations

import pytest
import torch

from draftmark import AttentionShape
from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.forward_sets import all_forwards
from draftmark_contract.cases.geometries import behaviours
from draftmark_contract.check import ContractViolation, Tier
from draftmark_contract.harness.harness import Harness
from draftmark_contract.harness.host_reads import host_reads
from draftmark_contract.harness.reachable import reachable_storages
from draftmark_contract.oracle.attention import attend, tolerance
from draftmark_contract.oracle.roundoffs import MOST_ROUNDOFFS, ROUNDOFFS
from draftmark_reference import ReferencePlugin


def reference() -> BackendUnderTest:
    """Return the reference backend on the host tier."""
    backend = LoadedBackend("reference", ReferencePlugin())
    return BackendUnderTest(backend, "cpu", Tier.HOST)


@pytest.mark.parametrize("read", [lambda t: t.item(), lambda t: (t + 1).max().item(), lambda t: t.tolist(), bool, int])
def test_host_read_of_a_watched_tensor_is_detected(read: object) -> None:
    """A host read is detected both on a watched tensor and on a result computed from it."""
    watched = torch.ones(1)
    with host_reads([watched]) as reads:
        read(watched)  # type: ignore[operator]
    assert reads


def test_host_read_of_other_tensors_is_allowed() -> None:
    """A host read of a tensor that the host itself created is not reported."""
    watched = torch.ones(1)
    with host_reads([watched]) as reads:
        torch.tensor([1, 2]).sum().item()
        watched.add_(1)
    assert not reads


def test_reachable_storages_searches_containers() -> None:
    """The search finds a backend's storages in attributes, lists and dicts, and counts a view as its base storage."""

    class Holder:
        def __init__(self) -> None:
            self.base = torch.zeros(4)
            self.deep = {"a": [self.base[1:], torch.zeros(2)]}

    assert len(reachable_storages(Holder())) == 2


def test_attention_of_one_key_is_its_value() -> None:
    """Attention over one key returns its value, query heads of a group share a KV head, and an empty row gives zero."""
    shape = AttentionShape(4, 2, 8, 1, softmax_scale=1.0)
    k, v = torch.randn(2, 3, 2, 8)
    out = attend(torch.randn(2, 4, 8), k, v, {(0, 0): (2,)}, [(0, 0), (0, 1)], shape).out
    assert torch.equal(out[0], v[2].double().repeat_interleave(2, dim=0))
    assert not out[1].any()


@pytest.mark.parametrize("roundoffs", range(ROUNDOFFS, MOST_ROUNDOFFS + 1))
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_missing_key_exceeds_the_tolerance(dtype: str, roundoffs: int) -> None:
    """If one key of 84 is left out, some output element differs by more than the tolerance, also a declared one."""
    torch.manual_seed(0)
    shape = AttentionShape(2, 1, 64, 1, dtype, dtype)
    k, v = torch.randn(2, 84, 1, 64)
    q, order = torch.randn(1, 2, 64) * 0.5, [(0, 0)]
    right = attend(q, k, v, {(0, 0): tuple(range(84))}, order, shape)
    wrong = attend(q, k, v, {(0, 0): tuple(range(83))}, order, shape)
    assert bool(((right.out - wrong.out).abs() > 2 * tolerance(right, dtype, shape, roundoffs)).any())


def test_sink_equals_a_key_with_value_zero() -> None:
    """An attention sink acts like a key with the sink's logit and value zero; a sink of -inf changes nothing."""
    shape = AttentionShape(4, 2, 8, 16, "float32", "float32", sinks=True)
    dice = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(n, heads, 8, generator=dice) for n, heads in ((1, 4), (5, 2), (5, 2)))
    sinks = torch.tensor([0.5, 3.0, float("-inf"), 1e4])
    order, rows = [(0, 0)], {(0, 0): (0, 1, 2, 3, 4)}
    got = attend(q, k, v, rows, order, shape, sinks=sinks).out[0]
    logits = torch.einsum("hd,nhd->hn", q[0].double(), k.double().repeat_interleave(2, 1)) * 8**-0.5
    weights = logits.exp() / (logits.exp().sum(-1) + sinks.double().exp())[:, None]
    wanted = torch.einsum("hn,nhd->hd", weights, v.double().repeat_interleave(2, 1))
    assert torch.allclose(got, wanted, atol=1e-12)
    assert torch.equal(got[2], attend(q, k, v, rows, order, shape).out[0, 2]) and not got[3].any()


def test_violation_shows_batch_and_both_values() -> None:
    """The message of a violation has the batch, the actual value, the expected value, and the formula."""
    forward = next(one for one in all_forwards(behaviours()["target"]) if one.name == "verify-edges")
    harness = Harness(reference(), forward.geometry, forward.num_pages)
    batch = harness.load(forward)
    harness.prepare(batch)
    harness.arena["slot_mapping"][3] += 1
    with pytest.raises(ContractViolation) as caught:
        harness.assert_metadata(forward, batch)
    text = str(caught.value)
    for part in ("row 3 of request 0", "verify step 0, 3 live of 4", "page_size=16", "got:", "expected:", "formula:"):
        assert part in text, text
    assert len(text.splitlines()) < 14
