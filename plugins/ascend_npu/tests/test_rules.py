"""Tests of the rules that are checked before an operator call. No operator runs, so torch_npu is not needed."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draftmark_ascend_npu import ops, rules
from draftmark_ascend_npu.ops import PagedAttention, TailAttention, scatter_kv
from draftmark_ascend_npu.rules import OperatorRule

HALF = torch.float16


def paged(**change):
    call = PagedAttention(
        q=torch.zeros(4, 8, 128, dtype=HALF),
        k=torch.zeros(6, 128, 2, 128, dtype=HALF),
        v=torch.zeros(6, 128, 2, 128, dtype=HALF),
        tables=torch.zeros(2, 3, dtype=torch.int32),
        causal=torch.zeros(2048, 2048, dtype=torch.int8),
        scale=0.1,
        out=torch.zeros(4, 8, 128, dtype=HALF),
        lse=torch.zeros(1),
    )
    return replace(call, **change)


def tail(**change):
    call = TailAttention(
        q=torch.zeros(2, 3, 8, 128, dtype=HALF),
        k=torch.zeros(2, 5, 2, 128, dtype=HALF),
        v=torch.zeros(2, 5, 2, 128, dtype=HALF),
        mask=torch.zeros(2, 1, 3, 5, dtype=torch.int8),
        scale=0.1,
        out=torch.zeros(2, 3, 8, 128, dtype=HALF),
        lse=torch.zeros(2, 8, 3, 1),
    )
    return replace(call, **change)


def test_correct_call_breaks_no_rule():
    """A correct call passes every rule, so that the refusals below are meaningful."""
    paged()._check([2, 4], [300, 384])
    rules.check_dense_mask(tail().mask, tail().q, tail().k)


@pytest.mark.parametrize(
    ("rows", "keys", "words"),
    [
        ([2, 2], [300, 7], "running sum|ends at 2"),
        ([4, 2], [300, 7], "decreases"),
        ([2, 5], [300, 7], "q has 4 rows"),
        ([2, 4], [300], "2 query and 1 key lengths"),
        ([2, 4], [300, -1], "actual_seq_lengths_kv"),
        ([2, 4], [300, 385], "3 columns, but 385 tokens need 4"),
        ([2, 4], [300, 1], "fewer keys than rows"),
    ],
)
def test_forbidden_lists_are_refused(rows, keys, words):
    """Lists with lengths instead of sums, a decreasing sum, unequal counts or more keys than the table are refused."""
    with pytest.raises(OperatorRule, match=words):
        paged().launch(rows, keys)


@pytest.mark.parametrize(
    "change",
    [
        {"q": torch.zeros(4, 8, 64, dtype=HALF), "out": torch.zeros(4, 8, 64, dtype=HALF)},
        {"q": torch.zeros(4, 8, 72, dtype=HALF), "out": torch.zeros(4, 8, 72, dtype=HALF)},
        {"q": torch.zeros(4, 8, 128)},
        {"q": torch.zeros(8, 4, 128, dtype=HALF).transpose(0, 1)},
        {"k": torch.zeros(6, 72, 2, 128, dtype=HALF), "v": torch.zeros(6, 72, 2, 128, dtype=HALF)},
        {"k": torch.zeros(6, 640, 2, 128, dtype=HALF), "v": torch.zeros(6, 640, 2, 128, dtype=HALF)},
        {"v": torch.zeros(5, 128, 2, 128, dtype=HALF)},
        {"tables": torch.zeros(2, 3, dtype=torch.int64)},
        {"tables": torch.zeros(3, 3, dtype=torch.int32)},
        {"tables": torch.zeros(3, 2, dtype=torch.int32).T},
        {"causal": torch.zeros(4, 300, dtype=torch.int8)},
        {"causal": torch.zeros(2048, 2048)},
    ],
)
def test_forbidden_tensors_are_refused(change):
    """A call with a forbidden head size, dtype, layout, block size, table shape or mask shape is refused."""
    with pytest.raises(OperatorRule, match=r"\((FIA|HOST)"):
        paged(**change).launch([2, 4], [300, 7])


@pytest.mark.parametrize(
    "change",
    [
        {"mask": torch.zeros(2, 1, 3, 4, dtype=torch.int8)},
        {"mask": torch.zeros(2, 1, 3, 5)},
        {"lse": torch.zeros(2, 8, 3, 1, dtype=HALF)},
        {"v": torch.zeros(2, 4, 2, 128, dtype=HALF)},
    ],
)
def test_forbidden_tail_call_is_refused(change):
    """The dense mask must be int8 and cover every row and slot, and the log-sum-exp must be float32."""
    with pytest.raises(OperatorRule, match=r"\(FIA"):
        tail(**change).launch()


@pytest.mark.parametrize(
    ("dtype", "slots", "words"),
    [
        (torch.bfloat16, torch.zeros(4, dtype=torch.int32), "its cache"),
        (HALF, torch.zeros(3, dtype=torch.int32), "one slot for each row"),
        (HALF, torch.zeros(4, dtype=torch.int64), "slot_mapping is torch.int64, but int32 is passed"),
    ],
)
def test_forbidden_scatter_is_refused(dtype, slots, words):
    """Rows and cache must have one dtype, and there must be one int32 slot per row."""
    rows, pages = torch.zeros(4, 2, 128, dtype=dtype), torch.zeros(6, 128, 2, 128, dtype=HALF)
    with pytest.raises(OperatorRule, match=words):
        scatter_kv(rows, rows, pages, pages, slots)


def test_every_rule_cites_its_source():
    """Every rule cites a section of torch_npu's page, CANN's host code, or a call in vllm-ascend."""
    texts = [Path(one.__file__).read_text() for one in (ops, rules)]
    sources = [found for text in texts for found in re.findall(r'rule\([^\n]*"([^"]*)"\)\n', text)]
    assert len(sources) > 20
    assert all(one.startswith(("FIA, ", "SCATTER, ", "HOST, ", "CALLS ", "CALLS, ", "MLA, ")) for one in sources)


def test_both_entry_points_get_the_same_arguments(monkeypatch):
    """The operator's second entry point gets the arguments of the first, under the names that V2_NAMES lists."""
    old, new = ops.FusedEntry(print, print, {}), ops.FusedEntry(print, print, ops.V2_NAMES)
    given = paged()._arguments([2, 4], [300, 7])
    assert old.arguments(given) == given
    renamed = new.arguments(given)
    assert len(renamed) == len(given) and renamed["actual_seq_kvlen"] == [300, 7]
    assert set(given) - set(renamed) == set(ops.V2_NAMES)
