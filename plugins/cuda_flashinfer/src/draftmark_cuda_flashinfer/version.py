"""Which FlashInfer this plugin was judged with. Reads metadata, imports nothing."""

from __future__ import annotations

import importlib.metadata as md
from functools import cache

DISTRIBUTION = "flashinfer-python"
TESTED = "0.6.18.post1"
"""The one version whose device verdict is recorded. The plan's layout and arguments move between versions."""
INSTALL = f"pip install 'draftmark-cuda-flashinfer[runtime]', which brings {DISTRIBUTION}=={TESTED}"


@cache
def installed() -> str | None:
    """The installed version, or None; asked once a process."""
    try:
        return md.version(DISTRIBUTION)
    except md.PackageNotFoundError:
        return None
