"""Silence for code of transformers that logs, warns and draws progress bars."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and everything on stderr inside the context; restore the settings afterwards."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
