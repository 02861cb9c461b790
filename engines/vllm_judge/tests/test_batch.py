"""Tests of the metadata that the judge passes to vLLM's builders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits, Mode

pytest.importorskip("vllm")
pytest.importorskip("draftmark_contract")


@pytest.mark.parametrize("loose", [0, 3])
def test_lengths_on_the_host_are_exact_or_none(loose: int) -> None:
    """If the host has only upper bounds, as in vLLM's asynchronous steps, the metadata has no exact host lengths."""
    from draftmark_contract.cases.forwards import uniform
    from draftmark_contract.judge.step import step_of
    from draftmark_vllm_judge.batch import RunnerBuffers

    limits = Limits(max_num_reqs=4, max_context_len=300, max_extend_tokens=64, capture_batch_sizes=(4,))
    draft = DraftShape(topk=1, num_steps=4, num_draft_tokens=5)
    geometry = Geometry.create(AttentionShape(4, 2, 64, page_size=16), limits, draft, modes=(Mode.DECODE, Mode.VERIFY))
    step = step_of(uniform("decode", geometry, Mode.DECODE, (40, 0, 133), 3), loose=loose)
    buffers = RunnerBuffers(geometry, step.forward.num_pages, "cpu")
    buffers.fill(step, 3)
    found = buffers.metadata(3, 3, 1, 137)
    assert found.seq_lens.tolist() == [41, 1, 134]
    assert found.seq_lens_cpu_upper_bound.tolist() == [41 + loose, 1 + loose, 134 + loose]
    if hasattr(found, "_seq_lens_cpu"):
        assert found._seq_lens_cpu is None if loose else found._seq_lens_cpu.tolist() == [41, 1, 134]


@pytest.mark.parametrize("threshold", [None, 1])
def test_requests_without_rows_are_dropped(threshold: int | None) -> None:
    """A request without rows is dropped, as vLLM never schedules one. Other rows keep their order and KV slots."""
    from draftmark_contract.cases.forwards import ragged
    from draftmark_contract.judge.step import step_of
    from draftmark_vllm_judge.order import in_runner_order

    limits = Limits(max_num_reqs=4, max_context_len=300, max_extend_tokens=64)
    geometry = Geometry.create(AttentionShape(4, 2, 64, page_size=16), limits, modes=(Mode.EXTEND,))
    step = step_of(ragged("hole", geometry, (4, 0, 5, 9), (3, 7, 0, 1)))
    found = in_runner_order(step, SimpleNamespace(reorder_batch_threshold=threshold))
    expected = [1, 3, 7] if threshold else [3, 7, 1]
    assert [one.rows for one in found.step.forward.requests] == expected
    rows = torch.arange(11.0)
    assert torch.equal(found.back(*found.rows(rows)), rows)
    given = sorted(step.writes.values())
    assert sorted(found.step.writes.values()) == given and len(given) == 11
