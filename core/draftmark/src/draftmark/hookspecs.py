"""The pluggy hooks of a backend, each with the name of a `BackendPlugin` method: six required and six optional.

Hooks run at start-up only, because a pluggy call costs more than a microsecond. The step loop calls the plain methods
of `draftmark.runtime.AttentionBackend` instead. Hooks have no default arguments; new inputs become dataclass fields.

An entry point in the group ``draftmark.backends.v1`` names a backend; the group's number is the contract major.
The entry point names a class derived from `draftmark.BackendPlugin`; its methods are the hooks. An object or a module
works too: its functions are called ``draftmark_NAME`` and decorated by `hookimpl`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pluggy

from .plugin import BackendPlugin

PREFIX = "draftmark_"
"""Start of a hook's name in pluggy, in objects and in modules."""

hookspec = pluggy.HookspecMarker("draftmark")
hookimpl = pluggy.HookimplMarker("draftmark")

STATE_HOOKS = ("state_supports", "state_buffers", "open_state")
"""Names of the hooks that get a `StateGeometry`."""
OPTIONAL = tuple(sorted(("explain", "tree_ops", "warm", *STATE_HOOKS)))
REQUIRED = ("buffers", "describe", "graph_state", "open_backend", "requirements", "supports")
OPTIONAL_HOOKS: tuple[str, ...] = tuple(PREFIX + name for name in OPTIONAL)
"""Hooks that a backend may omit."""
HOOKS: tuple[str, ...] = tuple(PREFIX + name for name in REQUIRED)
"""The six required hooks."""
SPECS = type(
    "Specs",
    (),
    {PREFIX + name: hookspec(firstresult=True)(getattr(BackendPlugin, name)) for name in REQUIRED + OPTIONAL},
)
"""Specifications for pluggy: the methods of `BackendPlugin`."""


def hooks_of(plugin: BackendPlugin) -> SimpleNamespace:
    """Return an object with the hooks of a plugin as pluggy needs them: the methods, under their prefixed names."""
    return SimpleNamespace(**{PREFIX + name: hookimpl(_hook(plugin, name)) for name in REQUIRED + OPTIONAL})


def _hook(plugin: BackendPlugin, name: str) -> Callable[..., Any]:
    """Return a function that calls a method by position, so that a plugin may name its parameters as it likes."""
    base = getattr(BackendPlugin, name).__get__(plugin)
    bind = inspect.signature(base).bind
    return functools.wraps(base)(lambda *given, **named: getattr(plugin, name)(*bind(*given, **named).args))


def hook_arguments() -> dict[str, tuple[str, ...]]:
    """Return the argument names of each hook, for error messages."""
    return {name: tuple(inspect.signature(getattr(SPECS, name)).parameters)[1:] for name in HOOKS + OPTIONAL_HOOKS}
