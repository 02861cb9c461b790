"""Tests of the function that chooses a backend by name or by device."""

from __future__ import annotations

import pytest

from draftmark_engines import EngineError, choice, choose


def test_a_device_has_a_default() -> None:
    """Without a name, the reference is chosen on a CPU."""
    assert choose(None, "cpu").name == "reference"


def test_named_backend_is_chosen() -> None:
    """A named backend is chosen if it runs on the device."""
    assert choose("cuda_triton", "cpu").name == "cuda_triton"


def test_unknown_backend_is_refused() -> None:
    """The error for an unknown backend name lists the installed backends."""
    with pytest.raises(EngineError, match=r"backend 'nonsense' does not exist; give an installed backend: .*reference"):
        choose("nonsense", "cpu")


def test_absent_plugin_is_refused_with_a_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error for a draftmark backend that is not installed has the pip command for its package."""
    monkeypatch.setattr(choice, "available", lambda: [])
    with pytest.raises(EngineError, match="backend cuda_triton is not installed; pip install draftmark-cuda-triton"):
        choose(None, "cuda")


def test_a_backend_of_another_device_is_refused() -> None:
    """A backend without kernels for the device is refused, and the error names the devices with kernels."""
    with pytest.raises(EngineError, match=r"it runs on cuda, not on cpu|is not installed"):
        choose("cuda_flashinfer", "cpu")


@pytest.mark.parametrize("named", [7, "", ["reference"]])
def test_a_name_is_a_string(named: object) -> None:
    """A value that is not a string, or is empty, is refused."""
    with pytest.raises(EngineError, match="is not a name; give an installed backend"):
        choose(named, "cpu")


def test_a_device_without_a_default_is_refused() -> None:
    """If a device has no default backend, the error names the device."""
    with pytest.raises(EngineError, match="device tpu has no default backend"):
        choose(None, "tpu")
