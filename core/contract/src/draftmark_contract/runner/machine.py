"""Collects facts about the machine of a run: date, versions, processor, compiler variables, device and driver."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from draftmark.registry import Available

from ..entries import entry
from .processor import processor

DRIVER_QUERY = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


VARIABLES = ("TRITON_", "PTXAS")
"""Beginnings of the names of environment variables that change how kernels are compiled."""


def machine_of(backend: str, device: str = "") -> dict[str, Any]:
    """Return date (UTC), Python, machine, processor, versions, compiler variables, and facts of `device` if given.

    The versions are those of draftmark, the plugin's distribution and its requirements.
    """
    row = entry(backend)
    distributions = (row.distribution, *_required(row)) if row else ()
    found = {**here(("draftmark", "draftmark-contract", "torch", *distributions)), "machine": platform.machine()}
    return {**found, "device": device_facts(device)} if device else found


def here(distributions: Iterable[str]) -> dict[str, Any]:
    """Return the facts about this machine that need no backend: date, Python, processor, versions and variables."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {
        "date": today,
        "python": platform.python_version(),
        "cpu": processor(),
        "versions": _versions(distributions),
        "environment": _variables(),
    }


def _versions(distributions: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = metadata.version(name)
        except (metadata.PackageNotFoundError, ValueError):
            continue
    return found


def _variables() -> dict[str, str]:
    """Return the environment variables of compilers. The home folder becomes ``~``, because records are published."""
    home = os.path.expanduser("~")
    named = sorted(name for name in os.environ if name.startswith(VARIABLES))
    return {name: os.environ[name].replace(home, "~") if len(home) > 1 else os.environ[name] for name in named}


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


def _required(row: Available) -> list[str]:
    try:
        required = metadata.requires(row.distribution) or []
    except metadata.PackageNotFoundError:
        return []
    return [re.split(r"[^A-Za-z0-9._-]", line.strip())[0] for line in required]
