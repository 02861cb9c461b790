"""Tests of the geometries and FlashInfer versions that the plugin refuses and accepts."""

from __future__ import annotations

import itertools

import pytest

from draftmark import DRAFT_MODES, TARGET_MODES, DeviceProfile, Limits, Mode
from draftmark_cuda_trtllm import contract, sizing, versions
from draftmark_cuda_trtllm.support import reasons_against

FP8 = "float8_e4m3fn"
B200 = DeviceProfile("cuda", 100, 148)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"page_size": 1}, "page_size 1 "),
        ({"page_size": 8}, "page_size 8 "),
        ({"page_size": 256}, "page_size 256 "),
        ({"head_dim": 100}, "head_dim 100"),
        ({"head_dim": 512}, "head_dim 512"),
        ({"num_qo_heads": 72, "num_kv_heads": 1}, "72 query heads"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, "q_dtype float32"),
        ({"q_dtype": "float16", "kv_dtype": "bfloat16"}, "kv_dtype bfloat16"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap 30.0"),
        ({"window_left": 127}, "window_left 127"),
        ({"sinks": True, "num_qo_heads": 40, "draft": (2, 3, 7)}, "5 query heads"),
        ({"sinks": True, "device": B200, "draft": (1, 1, 4)}, "sinks on sm_100"),
        ({"draft": (8, 200, 64)}, "tail of 1592"),
        ({"limits": Limits(70000, 128, 128)}, "grid holds 65535"),
        ({"device": DeviceProfile("cuda", 80, 108)}, "sm_80"),
        ({"device": DeviceProfile("cuda", 89, 142)}, "sm_89"),
        ({"device": DeviceProfile("npu", 0, 20)}, "npu"),
        ({"device": B200}, "trtllm-gen ignores masks"),
        ({"device": B200, "draft": (1, 1, 4), "page_size": 128}, "page_size 128 on sm_100"),
        ({"device": B200, "draft": (1, 1, 4), "kv_dtype": FP8}, "kv_dtype float8_e4m3fn on sm_100"),
        ({"device": B200, "draft": (1, 1, 4), "head_dim": 96}, "head_dim 96 on sm_100"),
    ],
)
def test_refusals_name_the_value(geometry, change, word):
    """Each unsupported geometry is refused with a reason that contains the value."""
    assert any(word in reason for reason in reasons_against(geometry(**change)))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"page_size": 16},
        {"page_size": 128},
        {"window_left": 127, "draft": (1, 1, 8)},
        {"window_left": 0, "modes": (Mode.EXTEND, Mode.DECODE)},
        {"kv_dtype": FP8},
        {"sinks": True},
        {"sinks": True, "num_qo_heads": 40, "modes": (Mode.EXTEND, Mode.DECODE)},
        {"q_dtype": "float16", "kv_dtype": "float16"},
        {"head_dim": 80, "num_qo_heads": 24},
        {"device": DeviceProfile("cuda", 120, 170)},
        {"device": B200, "draft": (1, 1, 4)},
        {"device": B200, "draft": (1, 3, 4), "modes": DRAFT_MODES},
    ],
)
def test_accepted_geometries_have_buffers_and_metadata(geometry, change):
    """Geometries close to refused ones are accepted, and have buffers and a metadata description of every mode."""
    made = geometry(**change)
    assert reasons_against(made) == []
    assert sizing.buffers(made)
    assert set(contract.layouts(made)) == set(made.modes)


def test_untested_version_is_refused(geometry, monkeypatch):
    """A FlashInfer version that is not accepted is refused, and the remedy has the accepted range."""
    monkeypatch.setattr(versions, "installed", lambda: "0.6.18.post1")
    (reason,) = reasons_against(geometry())
    assert "0.6.18.post1" in reason and versions.RANGE in reason


@pytest.mark.parametrize(("version", "ignored"), [("0.6.13", True), ("0.6.15.post2", True), ("0.6.16.post1", False)])
def test_fp8_trees_are_refused_before_0_6_16(geometry, monkeypatch, version, ignored):
    """FlashInfer before 0.6.16 is refused for fp8 trees, because its XQA ignores their mask (flashinfer#4199)."""
    monkeypatch.setattr(versions, "installed", lambda: version)
    reasons = reasons_against(geometry(kv_dtype=FP8))
    assert any("it ignores them" in reason for reason in reasons) is ignored
    assert not any("it ignores them" in reason for reason in reasons_against(geometry()))


def test_sizing_works_without_flashinfer(geometry, monkeypatch):
    """If FlashInfer is not installed, geometries are accepted, because sizing works without it."""
    monkeypatch.setattr(versions, "installed", lambda: None)
    assert reasons_against(geometry(TARGET_MODES)) == []


@pytest.mark.parametrize("arch", [90, 120, 121])
@pytest.mark.parametrize("kv", ["bfloat16", "float16", FP8])
def test_cuda_triton_prefills_every_xqa_shape(geometry, arch, kv):
    """cuda_triton accepts every page size, head size, dtype and window that XQA accepts."""
    from draftmark_cuda_triton import support

    shape = {"q_dtype": "bfloat16" if kv == FP8 else kv, "kv_dtype": kv}
    device = DeviceProfile("cuda", arch, 132)
    for page, dim, window in itertools.product((16, 32, 64, 128), range(16, 257, 16), (-1, 0, 127)):
        made = geometry(draft=(1, 1, 8), device=device, page_size=page, head_dim=dim, window_left=window, **shape)
        assert reasons_against(made) == support.reasons_against(made) == []


def test_missing_cuda_triton_is_refused(geometry, monkeypatch):
    """Loading without cuda_triton raises before anything is allocated, and the error has the pip command."""
    import importlib.util

    from draftmark import load
    from draftmark.errors import BackendLoadError

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "draftmark_cuda_triton" else found(name, *rest)
    )
    with pytest.raises(BackendLoadError, match="draftmark_cuda_triton is not installed") as refusal:
        load("cuda_trtllm").require_runtime("cuda")
    assert "pip install" in str(refusal.value) and "draftmark-cuda-triton" in str(refusal.value)
