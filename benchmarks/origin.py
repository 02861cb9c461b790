"""Where a recorded number comes from (the commit, the device, the versions), and where it goes."""

from __future__ import annotations

import importlib.metadata as md
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from draftmark_contract.runner.source import COMMIT_VARIABLE

ROOT = Path(__file__).parents[1]
"""The checkout."""
PROMPTS = ROOT / "examples" / "prompts"
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """What DRAFTMARK_COMMIT says, for a copy without history; else git's HEAD, and whether there are changes.

    "unknown" where neither tells.
    """
    return os.environ.get(COMMIT_VARIABLE) or _head()


def device_name(device: str) -> str:
    """The GPU's name; of a CPU the machine's type."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()


def versions(*names: str) -> dict[str, str]:
    """Of Python, of torch's CUDA ("" without), and of distributions; "absent" where one is not installed."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for name in names:
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found


def write(path: Path | None, result: dict[str, Any]) -> None:
    """A result file, if one was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _head() -> str:
    folder = str(ROOT)

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=True).stdout

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no").strip()
        return git("rev-parse", "HEAD").strip() + (" and changes" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
