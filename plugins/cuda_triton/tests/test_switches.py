"""`switches`: environment variables that select kernels and launches."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from draftmark import AttentionShape, BackendError, DeviceProfile, Geometry, Limits, Mode, load
from draftmark_contract.sizing.elsewhere import Place, RefusedVariables, answers_in
from draftmark_cuda_triton import kernel_list, switches


@pytest.mark.parametrize(
    ("name", "read"), [(switches.KERNELS, switches.uses_generic_kernels), (switches.LAUNCH, switches.launch_mode)]
)
def test_unknown_value_is_refused(monkeypatch, read_switches, name, read):
    """An unknown value raises one sentence with the variable, the value and the allowed values."""
    monkeypatch.setenv(name, "fast")
    with pytest.raises(BackendError, match=f"{name} is 'fast', but it must be auto or .*; unset it for auto"):
        read()
    monkeypatch.setenv(name, "")
    read_switches()
    assert read() in (False, "auto")


def test_generic_kernels_replace_the_hopper_kernels(monkeypatch):
    """DRAFTMARK_TRITON_KERNELS=generic launches the portable kernels on Hopper, in every mode."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    geometry = Geometry.create(
        AttentionShape(32, 8, 128, 16),
        Limits(8, 4096),
        None,
        DeviceProfile("cuda", 90, 132),
        (Mode.EXTEND, Mode.DECODE),
    )

    def packages():
        return {one.kernel.__module__.split(".")[1] for one in kernel_list.kernels_of(geometry)}

    assert packages() == {"kernels", "kernels_sm90"}
    monkeypatch.setenv(switches.KERNELS, "generic")
    assert packages() == {"kernels"}


def test_opened_backend_logs_its_kernels(caplog):
    """An opened backend logs its family of kernels and the attention shape once, at INFO."""
    geometry = Geometry.create(AttentionShape(4, 2, 32, 16), Limits(2, 64), modes=(Mode.DECODE,))
    with caplog.at_level("INFO", "draftmark_cuda_triton"):
        load("cuda_triton").open(geometry, "cpu")
    (message,) = [one.message for one in caplog.records if one.name == "draftmark_cuda_triton"]
    assert message.startswith("interpreted kernels for AttentionShape(num_qo_heads=4")


def test_newest_triton_is_the_bound_of_the_package():
    """pyproject.toml admits no Triton above the newest tested one."""
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    major, minor = switches.NEWEST_TRITON
    assert f"triton>=3.6,<{major}.{minor + 1}" in tomllib.loads(text)["project"]["dependencies"]


def test_contract_recognizes_a_refused_value():
    """A sizing hook in another process refuses an unknown value in words that the contract's suite understands."""
    with pytest.raises(RefusedVariables) as refusal:
        answers_in(Place("", {switches.KERNELS: "1"}, bare=True), "cuda_triton", DeviceProfile("cuda", 90, 132))
    assert refusal.value.names == (switches.KERNELS,)
