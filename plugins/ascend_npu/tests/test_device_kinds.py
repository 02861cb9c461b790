"""Tests of hardware detection, of the supported devices, and of the drivers and runtimes that support graphs."""

import pytest

from draftmark.errors import BackendError
from draftmark_ascend_npu import capability, device, switches
from draftmark_ascend_npu.device import EMULATED, Machine, driver_version, older

REAL = Machine("Ascend910B3", "9.1.0", "25.2.0", files=8)


def test_hardware_has_name_driver_and_device_files():
    """A machine with a device name, a driver and device files is hardware. Its stamp and record contain all three."""
    assert REAL.hardware and REAL.stamp() == "Ascend910B3, driver 25.2.0, CANN 9.1.0"
    assert REAL.record()["hardware"] is True and REAL.record()["driver"] == "25.2.0"


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        (Machine("Ascend910B3", "9.1.0"), "no driver version and no device file"),
        (Machine("Ascend910B3", "9.1.0", "25.2.0"), "no device file"),
        (Machine("Ascend910B3", "9.1.0", files=1), "no driver version"),
        (Machine("Ascend910B3", "9.1.0", "25.2.0", emulated=True, files=8), EMULATED),
        (Machine(), "torch_npu sees none"),
        (Machine(runtime=False), "libascendcl.so is not found"),
    ],
)
def test_device_name_is_not_enough_for_hardware(machine, words, monkeypatch):
    """A machine without driver or device files, or an emulator, is not hardware, and benchmarks refuse to run."""
    assert not machine.hardware and words in machine.stamp()
    monkeypatch.setattr(device, "machine", lambda: machine)
    with pytest.raises(RuntimeError, match="a benchmark needs hardware"):
        device.require_hardware("a benchmark")


@pytest.mark.parametrize(
    ("product", "cann", "words"),
    [
        ("Ascend910B2", "8.5.0", None),
        ("Ascend910_9392", "9.1.0", None),
        ("Ascend910B3", None, None),
        ("Ascend310P3", "9.1.0", "neither an A2"),
        ("Ascend950PR", "9.1.0", "neither an A2"),
        ("Ascend910A", "9.1.0", "neither an A2"),
        ("Ascend910B3", "8.3.RC1", "CANN 8.3.RC1 is older than 8.5.0"),
        ("Ascend910B3", "8.5.0.alpha001", "CANN 8.5.0.alpha001 is older than 8.5.0"),
    ],
)
def test_unsupported_products_and_versions_are_refused(product, cann, words, monkeypatch):
    """Only A2 and A3 with CANN 8.5.0 or later are accepted; an unknown version is accepted."""
    monkeypatch.setattr(device, "machine", lambda: Machine(product, cann, "25.2.0", files=1))
    if words is None:
        device.require_served()
        return
    with pytest.raises(BackendError, match=words):
        device.require_served()


def test_driver_without_task_updates_refuses_graphs(monkeypatch):
    """An old driver is refused for graphs, but not for eager forwards. The error has the needed version."""
    monkeypatch.setattr(capability, "has_external_events", lambda: True)
    monkeypatch.setattr(device, "machine", lambda: Machine("Ascend910B3", "9.1.0", "24.1.rc3", files=1))
    device.require_served()
    with pytest.raises(BackendError, match=r"driver 24\.1\.rc3 is older than 25\.0\.RC1"):
        device.require_graphs()
    monkeypatch.setattr(device, "machine", lambda: REAL)
    device.require_graphs()


@pytest.mark.parametrize(
    ("version", "least", "answer"),
    [
        ("25.0.rc1", "25.0.RC1", False),
        ("24.1.0.3", "25.0.RC1", True),
        ("25.0.rc1.1", "25.0.RC1", False),
        ("25.0.0", "25.0.RC1", False),
        ("9.0", "9.0.0", False),
        ("8.5.0.beta1", "8.5.0", True),
        ("8.5.1", "8.5.0", False),
        ("10.0.0", "9.1.0", False),
    ],
)
def test_versions_compare_in_release_order(version, least, answer):
    """Release candidates are older than their release, and version parts compare as numbers, so 9 is older than 10."""
    assert older(version, least) is answer


def test_driver_version_is_found(tmp_path, monkeypatch):
    """The driver's version is read from the installer's folder, else from the usual folder, else from npu-smi."""
    usual = tmp_path / "usr/local/Ascend/driver"
    usual.mkdir(parents=True)
    (usual / "version.info").write_text("Version=25.0.rc1\nascendhal_version=7.35\n")
    assert driver_version(tmp_path) == "25.0.rc1"
    other = tmp_path / "opt/npu/driver"
    other.mkdir(parents=True)
    (other / "version.info").write_text("Version=25.2.0\n")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ascend_install.info").write_text("Driver_Install_Path_Param=/opt/npu\n")
    assert driver_version(tmp_path) == "25.2.0"
    tool = tmp_path / "bin/npu-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '| npu-smi 24.1.rc3   Version: 24.1.rc3   |'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    assert driver_version(tmp_path / "empty") == "24.1.rc3"


def test_device_files_are_counted(tmp_path):
    """`device_files` counts only NPU device files, not davinci_manager or other files."""
    for name in ("davinci0", "davinci7", "davinci_manager", "hisi_hdc"):
        (tmp_path / name).touch()
    assert device.device_files(tmp_path) == 2


@pytest.mark.parametrize(("name", "read"), [(switches.HOST_WAIT, switches.host_wait), (switches.FUSED, switches.fused)])
def test_unknown_switch_value_raises(name, read, monkeypatch):
    """An unknown value of a switch (an environment variable) raises an error. An unset switch has its default."""
    monkeypatch.setenv(name, "yes")
    with pytest.raises(BackendError, match=f"{name} is 'yes'"):
        read()
    monkeypatch.delenv(name)
    assert not read()
