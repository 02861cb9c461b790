"""Tests of buffer sizes, and of the geometries that the plugin refuses. They use integers only, no tensors."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
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


def test_context_limit_has_a_block_for_the_tail():
    """256 tokens fill two blocks, and eight draft tokens need a third (sglang#22778)."""
    assert spec(sizing.TABLES, sizing.buffers(geometry())).shape == (4, 3)


def test_seed_e_table_without_draft_tokens_fails(monkeypatch):
    """The contract's sizing check fails if the block table has no columns for draft tokens after the context."""
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
    """Buffers for masks, draft tails and partial results depend on the draft shape, and not on the context length."""
    short, long = (sizing.buffers(geometry(context)) for context in (256, 131072))
    grown = [a.name for a, b in zip(short, long, strict=True) if a.nbytes != b.nbytes]
    assert grown == [sizing.TABLES]


def test_geometry_without_trees_has_no_tree_buffers():
    """With only EXTEND and DECODE, there are buffers for slots, block tables, the causal mask and copied lengths."""
    plain = Geometry.create(SHAPE, LIMITS, modes=(Mode.EXTEND, Mode.DECODE))
    assert [one.name for one in sizing.buffers(plain)] == [
        sizing.SLOTS,
        sizing.SLOTS32,
        sizing.TABLES,
        sizing.TRIANGLE,
        sizing.HOST_LENS,
    ]


def test_one_row_needs_no_tree_memory():
    """VERIFY with one row per request needs no bytes for trees, because one row is always a chain."""
    found = sizing.buffers(geometry(draft=DraftShape()))
    assert [one.nbytes for one in found[5:]] == [0] * 10


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size": 8}, "page_size 8"),
        ({"page_size": 200}, "page_size 200"),
        ({"page_size": 1024}, "page_size 1024"),
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"num_qo_heads": 2, "head_dim": 80}, "head_dim 80 without grouped heads"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "float32"),
        ({"kv_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({"q_dtype": "float16"}, "kv_dtype bfloat16"),
        ({"window_left": 127}, "window_left 127"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"num_qo_heads": 65, "num_kv_heads": 1}, "65 query heads"),
    ],
)
def test_undocumented_geometry_is_refused(change, word):
    """A geometry that the operator's page excludes is refused with one reason, which names the field and its value."""
    reasons = support.reasons_against(geometry(**change))
    assert len(reasons) == 1 and word in reasons[0]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(9, 3, 64, 128), (14, 2, 64, 128), (32, 8, 80, 128), (8, 1, 96, 16), (8, 2, 192, 256), (4, 2, 256, 512)]
    + [(4, 4, dim, 128) for dim in (64, 128, 192)],
)
def test_heads_and_pages_that_cann_takes_are_served(heads, kv_heads, dim, page):
    """The plugin serves the head sizes and page sizes that CANN accepts, with and without grouped query heads."""
    change = {"num_qo_heads": heads, "num_kv_heads": kv_heads, "head_dim": dim, "page_size": page}
    assert support.reasons_against(geometry(**change)) == []


@pytest.mark.parametrize(("arch", "served"), [(0, True), (910, True), (310, False), (950, False)])
def test_other_products_are_refused(arch, served):
    """Only the products A2 and A3, and a device profile without a product name, are served."""
    reasons = support.reasons_against(replace(geometry(), device=DeviceProfile("npu", arch, 24)))
    assert (not reasons) if served else (len(reasons) == 1 and f"arch {arch}" in reasons[0])


@pytest.mark.parametrize(("overlap", "need"), [(False, "exact"), (True, "recovered")])
def test_requirements_name_host_lengths_and_unique_slots(overlap, need):
    """The plugin requires unique slots and exact host lengths. With overlap, host length bounds are enough."""
    found = replace(geometry(), limits=Limits(4, 256, overlap=overlap))
    needs = AscendPlugin().requirements(found)
    assert needs.host_lengths == need and needs.unique_slots


def test_each_vendor_name_is_in_one_file():
    """torch_npu's operators are named only in ops.py, and graphs only in graph.py. Only runtime.py imports it."""
    package = Path(importlib.util.find_spec("draftmark_ascend_npu").origin).parent
    texts = {path.name: path.read_text() for path in package.glob("*.py")}
    for word, home in (("npu_fused", "ops.py"), ("npu_scatter", "ops.py"), ("NPUGraph()", "graph.py")):
        assert [name for name, text in texts.items() if f".{word}" in text] == [home]
    texts.pop("runtime.py")
    assert not [name for name, text in texts.items() if "import torch_npu" in text.replace(".runtime import", "")]
