"""Which FlashInfer this plugin was judged with. Reads metadata, imports nothing."""

from __future__ import annotations

import importlib.metadata as md
from functools import cache

DISTRIBUTION = "flashinfer-python"
# flashinfer#4267: 0.6.18 began a row's maximum at -5e4 of the unscaled products and gave zeros for rows below it, which
# the contract's `numerics.survive_any_logits` finds; 0.7.2 begins at minus infinity.
TESTED = "0.7.2"
"""The one version that the plugin is for. The plan's layout and arguments move between versions."""
INSTALL = f"pip install 'draftmark-cuda-flashinfer[runtime]', which brings {DISTRIBUTION}=={TESTED}"


@cache
def installed() -> str | None:
    """The installed version, or None; asked once a process."""
    try:
        return md.version(DISTRIBUTION)
    except md.PackageNotFoundError:
        return None
