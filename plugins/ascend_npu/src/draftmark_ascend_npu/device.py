"""Finds out whether this process's device is an Ascend NPU or the tests' emulator, by the driver's files.

A device name is no proof, because any library can return one. A device counts as hardware if the kernel driver has made
device files and reports a version. This module also checks what the plugin needs of an A2 or A3.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from draftmark import BackendError

from .capability import RUNTIME

EMULATED = "emulated, not hardware"
MARK = "draftmarkEmulatorVersion"
"""Function that only the emulator's runtime has."""
PRODUCTS = ("Ascend910B", "Ascend910_93")
"""Prefixes of product names: Atlas A2 and A3."""
MIN_CANN, MIN_DRIVER = "8.5.0", "25.0.RC1"
"""CANN: needed for fused attention over pages in TND with float16, and a workspace query that a capture can use.
Driver: needed for updates of task groups, without which no graph can be replayed."""


@dataclass(frozen=True)
class Machine:
    """Holds facts about the device and its software. A fact is None if it is unknown.

    Attributes:
        product: e.g. ``"Ascend910B3"``, from torch_npu.
        cann: version of CANN.
        driver: version of the driver.
        emulated: true if the runtime is the emulator.
        files: number of device files that the kernel driver made.
        runtime: true if CANN's or the emulator's runtime is found.
    """

    product: str | None = None
    cann: str | None = None
    driver: str | None = None
    emulated: bool = False
    files: int = 0
    runtime: bool = True

    @property
    def hardware(self) -> bool:
        """True for a device with a product name, a driver version and device files, and without the emulator."""
        return bool(self.product and self.driver and self.files and not self.emulated)

    def stamp(self) -> str:
        """Return one line that identifies the device; every result contains it."""
        if self.emulated:
            return EMULATED
        if not self.runtime:
            return f"no device: {RUNTIME} is not found"
        if self.product is None:
            return "no device: torch_npu sees none"
        if self.hardware:
            return f"{self.product}, driver {self.driver}, CANN {self.cann or 'unknown'}"
        lacking = " and ".join(["no driver version"] * (not self.driver) + ["no device file"] * (not self.files))
        return f"no device: the runtime reports {self.product}, but there is {lacking}"

    def record(self) -> dict[str, Any]:
        """Return the facts as a dictionary for a file of results."""
        return asdict(self) | {"hardware": self.hardware}

    def unmet(self) -> list[str]:
        """Return why the plugin cannot run on this device; an empty list if it can. Unknown facts are accepted."""
        reasons = []
        if self.product is not None and not self.product.startswith(PRODUCTS):
            reasons.append(f"{self.product} is neither an A2 ({PRODUCTS[0]}*) nor an A3 ({PRODUCTS[1]}*)")
        if self.cann is not None and older(self.cann, MIN_CANN):
            reasons.append(f"CANN {self.cann} is older than {MIN_CANN}; install {MIN_CANN} or later")
        return reasons


@cache
def machine() -> Machine:
    """Return the facts of this process's device. If CANN's or the emulator's runtime is found, load torch_npu."""
    try:
        runtime = ctypes.CDLL(RUNTIME)
    except OSError:
        return Machine(driver=driver_version(), files=device_files(), runtime=False)
    from .runtime import torch_npu

    product = str(torch_npu.npu.get_device_name()) if torch_npu.npu.is_available() else None
    cann = torch_npu.npu.utils.get_cann_version() or None
    return Machine(product, cann, driver_version(), hasattr(runtime, MARK), device_files())


def stamp() -> str:
    """Return one line that identifies this process's device. The line states if it is not proven to be hardware."""
    return machine().stamp()


def require_hardware(what: str) -> str:
    """Return the stamp (one line that identifies the device), if the device is hardware.

    Raises:
        RuntimeError: the device is no hardware, so a result of `what` would be worthless.
    """
    if not machine().hardware:
        raise RuntimeError(
            f"{what} needs hardware, but this is: {stamp()}; run it on an Ascend NPU with CANN, in a process that can "
            "see /dev/davinci* and npu-smi or the driver's version.info"
        )
    return stamp()


def require_served() -> None:
    """Raise `BackendError` if the plugin does not support this device."""
    if reasons := machine().unmet():
        raise BackendError(f"ascend_npu does not run here: {'; '.join(reasons)}")


def require_graphs() -> None:
    """Raise `BackendError` if the runtime or driver cannot replay a graph with new lengths."""
    from .capability import VALUE_FUNCTIONS, has_external_events

    if not has_external_events():
        raise BackendError(
            f"{RUNTIME} lacks {' or '.join(VALUE_FUNCTIONS)}, so a replay would run with another round's lengths; "
            f"install CANN {MIN_CANN} or later, or run without graphs"
        )
    driver = machine().driver
    if driver is not None and older(driver, MIN_DRIVER):
        raise BackendError(
            f"driver {driver} is older than {MIN_DRIVER}, which is the first with updates of task groups; install "
            f"{MIN_DRIVER} or later, or run without graphs"
        )


# -- facts of the driver ----------------------------------------------------------------------------------


def device_files(folder: Path = Path("/dev")) -> int:
    """Return the number of NPU device files that the kernel driver made."""
    return sum(bool(re.fullmatch(r"davinci\d+", one.name)) for one in folder.glob("davinci*"))


def driver_version(root: Path = Path("/")) -> str | None:
    """Return the driver's version from its version.info or from npu-smi; None without either."""
    installed = _field(root / "etc/ascend_install.info", "Driver_Install_Path_Param") or "/usr/local/Ascend"
    for folder in (installed.lstrip("/"), "usr/local/Ascend"):
        if found := _field(root / folder / "driver/version.info", "Version"):
            return found
    return _from_npu_smi()


def _field(file: Path, name: str) -> str | None:
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(rf"^{name}\s*=\s*(\S+)", text, re.MULTILINE | re.IGNORECASE)
    return found[1] if found else None


def _from_npu_smi() -> str | None:
    tool = shutil.which("npu-smi")
    if tool is None:
        return None
    try:
        said = subprocess.run([tool, "info"], capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"Version:\s*(\d\S*)", said)
    return found[1] if found else None


def older(version: str, least: str) -> bool:
    """Return true if `version` comes before `least`. 25.0.RC1 is before 25.0.0, and 8.5.0.alpha001 before 8.5.0."""
    return _rank(version) < _rank(least)


def _rank(version: str) -> tuple[tuple[int, ...], int, int]:
    """Return a sort key of a version: its numbers, its stage (alpha, beta, rc or release), and the stage's number."""
    text = version.lower().lstrip("v")
    lead = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in lead[0].split(".")] if lead else []
    word = re.search(r"(alpha|beta|rc)\.?(\d*)", text)
    stage = ("alpha", "beta", "rc").index(word[1]) if word else 3
    return (*numbers, 0, 0, 0)[:3], stage, int(word[2] or 0) if word else 0
