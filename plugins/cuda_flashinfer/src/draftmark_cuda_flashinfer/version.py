"""FlashInfer releases that this plugin accepts. Reads metadata and imports nothing."""

from __future__ import annotations

import importlib.metadata as md
from functools import cache

DISTRIBUTION = "flashinfer-python"
# flashinfer#4267: 0.6.18 started a row's maximum at -5e4 of the unscaled products and returned zeros for rows below it.
# The contract's `numerics.survive_any_logits` finds that. 0.7.0 starts at minus infinity.
ACCEPTED = ("0.7.0.post1", "0.7.1", "0.7.2", "0.7.2.post1", "0.7.4")
"""Accepted releases, oldest first. `tests/test_version_drift.py` reads each one's sources. PyPI has no 0.7.3."""
RANGE = f">={ACCEPTED[0]},<={ACCEPTED[-1]}"
INSTALL = f"pip install 'draftmark-cuda-flashinfer[runtime]', which installs {DISTRIBUTION}{RANGE}"


@cache
def installed() -> str | None:
    """Return the installed version, or None; the metadata is read once per process."""
    try:
        return md.version(DISTRIBUTION)
    except md.PackageNotFoundError:
        return None


def since(release: str) -> bool:
    """Return true if the installed FlashInfer is `release` of `ACCEPTED`, or a later one.

    Without FlashInfer, and with a version outside `ACCEPTED`, sizes are those of the newest release.
    """
    found = installed()
    position = ACCEPTED.index(found) if found in ACCEPTED else len(ACCEPTED)
    return position >= ACCEPTED.index(release)
