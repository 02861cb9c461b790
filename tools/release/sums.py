"""Checksums of a release's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

NAME = "SHA256SUMS"


def write_sums(out: Path) -> None:
    """Write SHA256SUMS of all files in a folder, for `sha256sum --check`. An older SHA256SUMS is replaced."""
    files = sorted(path for path in out.iterdir() if path.name != NAME)
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (out / NAME).write_text("".join(lines), encoding="utf-8")
