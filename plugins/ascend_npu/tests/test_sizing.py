"""Sizing and refusals: integers only."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.geometry import TARGET_MODES
from draftmark.registry import load
from draftmark_ascend_npu import AscendPlugin, sizing, support
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import ContractViolation, Tier
from draftmark_contract.checks.sizing import assert_covered

SHAPE = AttentionShape(8, 2, 128, 128)
LIMITS = Limits(max_num_reqs=4, max_context_len=256)


def geometry(context=256, draft=None, **change):
    return Geometry.create(
        replace(SHAPE, **change), Limits(4, context), draft or DraftShape(4, 1, 8), modes=TARGET_MODES
    )


def spec(name, found):
    return next(one for one in found if one.name == name)


def test_a_request_at_the_context_wall_has_a_block_for_its_tail():
    """sglang#22778: 256 tokens fill two blocks, and eight draft tokens need a third."""
    assert spec(sizing.TABLES, sizing.buffers(geometry())).shape == (4, 3)


def test_seed_e_a_table_without_the_draft_tokens_is_refuted(monkeypatch):
    """The same table sized from the context alone does not pass the contract's sizing check."""
    correct = sizing.buffers

    def without_draft_tokens(g):
        columns = -(-g.limits.max_context_len // g.attention.page_size)
        return [replace(one, shape=(one.shape[0], columns)) if one.name == sizing.TABLES else one for one in correct(g)]

    subject = BackendUnderTest(load("ascend_npu"), "cpu", Tier.SIZING)
    assert_covered(subject, subject.fit(geometry()))
    monkeypatch.setattr(AscendPlugin, "buffers", staticmethod(without_draft_tokens))
    with pytest.raises(ContractViolation, match=r"block_tables.*columns"):
        assert_covered(subject, subject.fit(geometry()))


def test_only_the_block_tables_grow_with_the_context():
    """Masks, tails and partial results are those of the draft shape."""
    short, long = (sizing.buffers(geometry(context)) for context in (256, 131072))
    grown = [a.name for a, b in zip(short, long, strict=True) if a.nbytes != b.nbytes]
    assert grown == [sizing.TABLES]


def test_a_geometry_without_trees_has_no_tree_buffers():
    """EXTEND and DECODE need slots, tables and the constant mask."""
    plain = Geometry.create(SHAPE, LIMITS, modes=(Mode.EXTEND, Mode.DECODE))
    assert [one.name for one in sizing.buffers(plain)] == [sizing.SLOTS, sizing.TABLES, sizing.TRIANGLE]


def test_one_row_needs_no_tree_memory():
    """A tail of which each request has one row is a chain, so VERIFY with D = 1 takes no bytes."""
    found = sizing.buffers(geometry(draft=DraftShape()))
    assert [one.nbytes for one in found[3:]] == [0] * 8


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size": 16}, "page_size 16"),
        ({"page_size": 256}, "page_size 256"),
        ({"head_dim": 64}, "head_dim 64"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"q_dtype": "float16"}, "kv_dtype bfloat16"),
        ({"window_left": 127}, "window_left 127"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"num_qo_heads": 65, "num_kv_heads": 1}, "65 query heads"),
    ],
)
def test_what_the_operator_does_not_document_is_refused_with_a_reason(change, word):
    """One reason, which names the field and its value."""
    reasons = support.reasons_against(geometry(**change))
    assert len(reasons) == 1 and word in reasons[0]


def test_exact_host_lengths_and_unique_slots_are_declared():
    """The operator takes lists of the host, and its scatter does not allow a slot twice."""
    needs = AscendPlugin().requirements(geometry())
    assert needs.host_lengths == "exact" and needs.unique_slots


def test_each_vendor_name_is_in_one_file():
    """Operators in ops.py, graphs in graph.py; nobody imports torch_npu at the top of a file."""
    package = Path(importlib.util.find_spec("draftmark_ascend_npu").origin).parent
    texts = {path.name: path.read_text() for path in package.glob("*.py")}
    for word, home in (("npu_fused", "ops.py"), ("npu_scatter", "ops.py"), ("NPUGraph()", "graph.py")):
        assert [name for name, text in texts.items() if f".{word}" in text] == [home]
    assert not [name for name, text in texts.items() if "\nimport torch_npu" in text or "\nfrom torch_npu" in text]
