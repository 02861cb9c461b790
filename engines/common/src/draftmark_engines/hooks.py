"""Warnings about hooks that the installed release of an engine does not offer."""

from __future__ import annotations

import logging
from functools import cache

logger = logging.getLogger(__package__)


@cache
def warn_missing_hook(engine: str, hook: str, effect: str) -> None:
    """Log once in a process, at WARNING, that an engine does not call a hook, and what follows from it.

    Args:
        engine: name of the engine. hook: dotted name of the function or method that the engine should call.
        effect: clause with the consequence, for example ``"draft steps are slower"``.
    """
    logger.warning("%s does not call %s, so %s", engine, hook, effect)
