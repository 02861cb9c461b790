"""Origin of a recorded number (commit, device, versions), and the writer of result files."""

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
"""Root of the checkout."""
PROMPTS = ROOT / "examples" / "prompts"
RESULTS = ROOT / "benchmarks" / "results"


def commit() -> str:
    """Return $DRAFTMARK_COMMIT, for a copy without history, or git's HEAD with a note about changes.

    "unknown" if neither exists.
    """
    return os.environ.get(COMMIT_VARIABLE) or _head()


def device_name(device: str) -> str:
    """Return the GPU's name, or the machine's type for a CPU."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else platform.machine()


def visible_device() -> str:
    """Return the name of the first GPU without initializing it in this process, or "cpu"."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return "cpu"


def versions(*names: str) -> dict[str, str]:
    """Return versions: Python, torch's CUDA ("" on a CPU build), and each distribution ("absent" if not installed)."""
    found = {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
    for name in names:
        try:
            found[name] = md.version(name)
        except md.PackageNotFoundError:
            found[name] = "absent"
    return found


def write(path: Path | None, result: dict[str, Any]) -> None:
    """Write a result file, if a path is given."""
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
