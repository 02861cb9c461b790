"""What SGLang is told of draftmark: a name for its command line, a factory, and the hooks."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from draftmark_engines import EngineError

from . import NAME
from .heads import PACKAGE
from .hooks import register_hooks
from .versions import SUPPORTED

if TYPE_CHECKING:
    from .backend import DraftmarkBackend

CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")
"""Where the functions that add to the command line's choices are: newer releases first."""
ADDERS = ("add_attention_backend_choices", "add_draft_attention_backend_choices")
"""The second has its own list in newer releases alone; before, the two options share one."""


def register_all() -> None:
    """Register name, factory and hooks. Of a release that is not served, the factory says so: SGLang would log and
    forget whatever is raised here."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_choices()
    # SGLang reads it when it first imports its own models. Whoever has a package of their own imports ours there.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE)
    register_attention_backend(NAME)(create_backend)
    try:
        SUPPORTED.require()
    except EngineError:
        return
    register_hooks()


def add_choices() -> None:
    """Let ``--attention-backend`` and ``--speculative-draft-attention-backend`` take the name."""
    for place in CHOICES:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        if hasattr(module, ADDERS[0]):
            for name in ADDERS:
                getattr(module, name, lambda choices: None)([NAME])
            return
    raise EngineError(f"SGLang's {ADDERS[0]} is in none of {', '.join(CHOICES)}; take a release that is served")


def create_backend(runner: Any) -> DraftmarkBackend:
    """The factory that SGLang calls with a `ModelRunner`."""
    SUPPORTED.require()
    from .backend import DraftmarkBackend

    return DraftmarkBackend(runner)
