"""The choice of a backend by name or by device."""

from __future__ import annotations

import pytest

from draftmark_engines import EngineError, choice, choose


def test_a_device_has_a_default() -> None:
    """Without a name a CPU is served by the reference."""
    assert choose(None, "cpu").name == "reference"


def test_a_name_is_taken() -> None:
    """A named backend that runs on the device serves."""
    assert choose("cuda_triton", "cpu").name == "cuda_triton"


def test_an_unknown_backend_is_refused_with_those_installed() -> None:
    """The sentence lists what is there."""
    with pytest.raises(EngineError, match=r"there is no backend 'nonsense'; give one of those installed: .*reference"):
        choose("nonsense", "cpu")


def test_a_plugin_that_is_not_installed_is_refused_with_its_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of draftmark's own is known by its package."""
    monkeypatch.setattr(choice, "available", lambda: [])
    with pytest.raises(EngineError, match="backend cuda_triton is not installed; pip install draftmark-cuda-triton"):
        choose(None, "cuda")


def test_a_backend_of_another_device_is_refused() -> None:
    """A backend without kernels for the device says on what it runs."""
    with pytest.raises(EngineError, match=r"it runs on cuda, not on cpu|is not installed"):
        choose("cuda_flashinfer", "cpu")


@pytest.mark.parametrize("named", [7, "", ["reference"]])
def test_a_name_is_a_string(named: object) -> None:
    """Anything else is refused with its value."""
    with pytest.raises(EngineError, match="but it is a name"):
        choose(named, "cpu")


def test_a_device_without_a_default_is_refused() -> None:
    """The sentence names the device."""
    with pytest.raises(EngineError, match="device tpu has no default backend"):
        choose(None, "tpu")
