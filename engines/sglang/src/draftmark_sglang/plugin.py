"""Registration with SGLang: the name on its command line, the backend factory, and the hooks."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from draftmark_engines import EngineError

from .facts import NAME
from .heads import PACKAGE
from .hook_functions import register_hooks
from .versions import SUPPORTED

if TYPE_CHECKING:
    from .backend import DraftmarkBackend

CHOICES = ("sglang.srt.arg_groups.choices", "sglang.srt.server_args")
"""Modules that may contain the functions in `ADDERS`, newer releases first."""
ADDERS = ("add_attention_backend_choices", "add_draft_attention_backend_choices")
"""Functions that add names to an option's choices. Older releases lack the second: there both options share a list."""


def register_all() -> None:
    """Register the name, the factory and the hooks.

    For an unsupported release only the factory raises: SGLang logs and drops every error that is raised here.
    """
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    add_choices()
    # SGLang reads this variable when it first imports its models. If a user has
    # set it to another package, that package must import draftmark's models.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", PACKAGE)
    register_attention_backend(NAME)(create_backend)
    try:
        SUPPORTED.require()
    except EngineError:
        return
    register_hooks()


def add_choices() -> None:
    """Add `NAME` to the choices of ``--attention-backend`` and ``--speculative-draft-attention-backend``.

    Raises:
        EngineError: no module of `CHOICES` has the function.
    """
    for place in CHOICES:
        try:
            module = importlib.import_module(place)
        except ModuleNotFoundError:
            continue
        if hasattr(module, ADDERS[0]):
            for name in ADDERS:
                getattr(module, name, lambda choices: None)([NAME])
            return
    raise EngineError(
        f"SGLang has {ADDERS[0]} in none of {', '.join(CHOICES)}; install a supported release, see docs/sglang.md"
    )


def create_backend(runner: Any) -> DraftmarkBackend:
    """Create the backend for an SGLang `ModelRunner`; SGLang calls this factory.

    Raises:
        EngineError: the SGLang release or the run is not supported.
    """
    SUPPORTED.require()
    from .backend import DraftmarkBackend

    return DraftmarkBackend(runner)
