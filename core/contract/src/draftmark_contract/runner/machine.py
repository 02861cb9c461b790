"""Facts about the machine of a run: date, Python, versions, and for the device tier the device and its driver."""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from importlib import metadata
from typing import Any

from draftmark.registry import Available, entry

DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def machine_of(backend: str, device: str = "") -> dict[str, Any]:
    """Return date (UTC), Python, machine, versions of the backend's requirements, and facts of `device` if given."""
    row = entry(backend)
    versions = {}
    for package in ("draftmark", "draftmark-contract", "torch", row.distribution if row else "", *_required(row)):
        try:
            versions[package] = metadata.version(package)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    found = {"date": today, "python": platform.python_version(), "machine": platform.machine(), "versions": versions}
    return {**found, "device": device_facts(device)} if device else found


def device_facts(device: str) -> dict[str, str]:
    """Return kind and name of a torch device; for CUDA also the driver version and torch's CUDA version."""
    import torch

    where = torch.device(device)
    module: Any = getattr(torch, where.type, None)
    if where.type == "cpu" or not hasattr(module, "get_device_name"):
        return {"kind": where.type, "name": platform.processor() or platform.machine()}
    facts = {"kind": where.type, "name": str(module.get_device_name(where.index or 0))}
    if where.type == "cuda":
        facts |= {"driver": _driver(), "cuda": str(torch.version.cuda)}
    return facts


def _driver() -> str:
    try:
        said = subprocess.run(DRIVER_QUERY, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return said.partition("\n")[0].strip()


def _required(row: Available | None) -> list[str]:
    try:
        required = metadata.requires(row.distribution) or [] if row else []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^A-Za-z0-9._-]", line.strip())[0] for line in required]
