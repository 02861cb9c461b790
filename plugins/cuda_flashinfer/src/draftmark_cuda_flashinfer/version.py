"""FlashInfer version that this plugin is tested with. Reads metadata and imports nothing."""

from __future__ import annotations

import importlib.metadata as md
from functools import cache

DISTRIBUTION = "flashinfer-python"
# flashinfer#4267: 0.6.18 started a row's maximum at -5e4 of the unscaled products and returned zeros for rows below it.
# The contract's `numerics.survive_any_logits` finds that. 0.7.2 starts at minus infinity.
TESTED = "0.7.2"
"""The one version that the plugin accepts. The plan's layout and arguments change between versions."""
INSTALL = f"pip install 'draftmark-cuda-flashinfer[runtime]', which installs {DISTRIBUTION}=={TESTED}"


@cache
def installed() -> str | None:
    """Return the installed version, or None; the metadata is read once per process."""
    try:
        return md.version(DISTRIBUTION)
    except md.PackageNotFoundError:
        return None
