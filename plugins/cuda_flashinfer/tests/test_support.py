"""Tests of the geometries and library versions that the plugin refuses and accepts."""

from __future__ import annotations

import pytest

from draftmark import DRAFT_MODES, DeviceProfile, Limits, Mode, load
from draftmark.errors import BackendRefusal
from draftmark_cuda_flashinfer import support
from draftmark_cuda_flashinfer.support import reasons_against
from draftmark_cuda_flashinfer.version import ACCEPTED, RANGE

PLAIN = (Mode.EXTEND, Mode.DECODE)
REFUSALS = {
    "device": ({"kind": "npu"}, "device kind npu is not served"),
    "old": ({"arch": 75}, "sm_75 is not served"),
    "head_dim": ({"head_dim": 80}, "head_dim 80 is not served: FA2 is built here for 64, 128, 256"),
    "float32": ({"q_dtype": "float32", "kv_dtype": "float32"}, "q_dtype float32 is not served"),
    "fp8": ({"kv_dtype": "float8_e4m3fn"}, "FlashInfer takes KV scales as host numbers"),
    "mixed": ({"q_dtype": "float16"}, "kv_dtype bfloat16 with q_dtype float16 is not served"),
    "merge": ({"num_qo_heads": 128, "num_kv_heads": 8}, "the merge needs 2048 threads a row"),
    "block": ({"window_left": 9, "block_size": 4, "modes": (Mode.DRAFT_BLOCK,)}, "window_left 9 with mode draft_block"),
    "slots": ({"max_num_reqs": 4096, "max_context_len": 1 << 20}, "token slots or mask bytes up to"),
    "pages": ({"max_num_reqs": 4096, "max_context_len": 1 << 20, "page_size": 1, "modes": PLAIN}, "indptr holds"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_the_value(make_geometry, name):
    """Each unsupported geometry is refused with one reason, which has field, value and limit."""
    fields, expected = REFUSALS[name]
    (reason,) = reasons_against(make_geometry(**fields))
    assert expected in reason


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"modes": DRAFT_MODES},
        {"modes": (Mode.EXTEND, Mode.DRAFT_BLOCK), "block_size": 8},
        {"window_left": 5, "logits_soft_cap": 30.0},
        {"head_dim": 256, "page_size": 1},
        {"q_dtype": "float16", "kv_dtype": "float16", "page_size": 1024, "num_kv_heads": 1},
        {"num_qo_heads": 128, "num_kv_heads": 8, "modes": PLAIN},
    ],
    ids=str,
)
def test_served_geometries_have_no_reason(make_geometry, fields):
    """Windows with trees, logits caps, every page size, and many heads without a merge are accepted."""
    assert reasons_against(make_geometry(**fields)) == []


@pytest.mark.parametrize("version", ["0.6.18.post1", "0.7.3"])
def test_other_version_is_refused(make_geometry, monkeypatch, version):
    """A version that is not accepted is refused. The reason lists the accepted ones and has the install command."""
    monkeypatch.setattr(support, "installed", lambda: version)
    (reason,) = reasons_against(make_geometry())
    assert f"flashinfer-python {version} is not served" in reason
    assert all(accepted in reason for accepted in ACCEPTED)
    assert reason.endswith(f"pip install 'flashinfer-python{RANGE}'")


@pytest.mark.parametrize("version", ACCEPTED)
def test_accepted_versions_are_served(make_geometry, monkeypatch, version):
    """Each accepted FlashInfer version has no reason against it."""
    monkeypatch.setattr(support, "installed", lambda: version)
    assert reasons_against(make_geometry()) == []


def test_missing_library_is_not_refused(make_geometry, monkeypatch):
    """If FlashInfer is not installed, geometries have no reason against them; the registry reports the absence."""
    monkeypatch.setattr(support, "installed", lambda: None)
    assert reasons_against(make_geometry()) == []


def test_overlap_is_refused_with_the_remedy(make_geometry):
    """A geometry with overlap is refused when it is loaded, with overlap=False as the remedy."""
    geometry = make_geometry()
    limits = Limits(6, 1000, 256, (1, 4, 8), overlap=True)
    overlapped = type(geometry).create(geometry.attention, limits, geometry.draft, DeviceProfile("cuda", 90, 132))
    with pytest.raises(BackendRefusal, match="overlap=False"):
        load("cuda_flashinfer").require(overlapped)
