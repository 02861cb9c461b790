"""Environment variables that help to find a fault, the tested Triton releases, and the plugin's logger.

DRAFTMARK_TRITON_KERNELS=generic        the portable kernels of `kernels`, also on Hopper. If a wrong token becomes
                                        right, the cause is in `kernels_sm90`.
DRAFTMARK_TRITON_LAUNCH=triton|driver   triton: every launch through Triton's own launcher. If a wrong token becomes
                                        right, the cause is in `launch`. driver: an error instead of a slower launch.
DRAFTMARK_PREPARE=0                     the core's: opening a backend compiles nothing; each kernel compiles when it
                                        is launched.

`auto` is the default of the first two. LAUNCH is read once, KERNELS whenever a kernel configuration is selected.
"""

from __future__ import annotations

import logging
import os
from functools import cache

from draftmark import BackendError

KERNELS, LAUNCH = "DRAFTMARK_TRITON_KERNELS", "DRAFTMARK_TRITON_LAUNCH"
NEWEST_TRITON = (3, 9)
"""Newest Triton release with which the kernels and their launches were run. pyproject.toml has the same bound."""
logger = logging.getLogger(__package__)


def uses_generic_kernels() -> bool:
    """Check whether the portable kernels also serve Hopper."""
    return _choice(KERNELS, ("auto", "generic")) == "generic"


@cache
def launch_mode() -> str:
    """Return ``"auto"``, ``"triton"`` or ``"driver"``: how compiled kernels are launched."""
    return _choice(LAUNCH, ("auto", "triton", "driver"))


@cache
def uses_own_launch() -> bool:
    """Check whether launches skip Triton's argument binding: unless it is switched off, or this Triton is untested."""
    mode = launch_mode()
    return mode == "driver" or (mode == "auto" and is_tested_triton())


@cache
def is_tested_triton() -> bool:
    """Check whether this Triton is at most NEWEST_TRITON; log a warning once if not."""
    import triton

    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    newest = ".".join(map(str, NEWEST_TRITON))
    if version > NEWEST_TRITON:
        logger.warning(
            "Triton %s is newer than %s, the newest tested: kernels compile at first launch, into Triton's "
            "own cache, and every launch takes Triton's own, slower path; install triton<=%s.99",
            triton.__version__, newest, newest,
        )  # fmt: skip
    return version <= NEWEST_TRITON


def _choice(name: str, allowed: tuple[str, ...]) -> str:
    value = os.environ.get(name) or allowed[0]
    if value not in allowed:
        raise BackendError(f"{name} is {value!r}, but it must be {' or '.join(allowed)}; unset it for {allowed[0]}")
    return value
