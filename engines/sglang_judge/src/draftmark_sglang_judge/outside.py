"""Backends from outside of SGLang: a class of any package, or a name that an installed plugin registers.

SGLang makes the backend by its own registry. Draft steps keep SGLang's Triton backend, because the factory for draft
steps takes only SGLang's names.
"""

from __future__ import annotations

import importlib
import importlib.metadata as md
import importlib.util
import os
import re
from pathlib import Path
from typing import Any

from draftmark.errors import DraftmarkError

from .importing import prepare_imports

GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")
"""SGLang's groups of plugins."""
OWN = "draftmark-sglang"
REGISTRY = "sglang.srt.layers.attention.attention_registry"
JUDGED = "judged_class"
"""Name under which the judge registers a class."""
DRAFTS = "draft steps run a class of their own, which SGLang's factory makes for its own backends only"
DRAFT_BACKEND = "triton"


def plugins() -> list[str]:
    """Return the names of the installed plugins, without this adapter's own."""
    found = [one for group in GROUPS for one in md.entry_points(group=group)]
    return sorted({one.name for one in found if one.dist is None or one.dist.name != OWN})


def plugin_setting() -> str:
    """Return SGLANG_PLUGINS for these plugins only; a value that the user has set is kept. An empty value means all."""
    return os.environ.get("SGLANG_PLUGINS") or ",".join(plugins()) or "none"


def is_path(named: str) -> bool:
    """Return True for ``"package.module.Class"`` and ``"package.module:Class"``."""
    return bool(re.fullmatch(r"\w+(\.\w+)*[.:]\w+", named))


def is_named(named: str) -> bool:
    """Return True for a class path, a name of SGLang's registry, and any name if a plugin can have registered it."""
    return is_path(named) or named in _registered() or (bool(plugins()) and named.isidentifier())


def _registered() -> set[str]:
    """Return the names in SGLang's registry, from its source text."""
    spec = importlib.util.find_spec("sglang")
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder, *REGISTRY.split(".")[1:]).with_suffix(".py")
        if file.exists():
            return set(re.findall(r'register_attention_backend\("(\w+)"\)', file.read_text(encoding="utf-8")))
    return set()


def find(named: str, device: str) -> Any:
    """Return the class of a path, or the function that a plugin or SGLang registered for a name.

    Raises:
        DraftmarkError: there is none, or its import fails.
    """
    prepare_imports(device)
    try:
        if is_path(named):
            module, _, name = named.rpartition(":" if ":" in named else ".")
            return _checked(getattr(importlib.import_module(module), name))
        from sglang.srt.plugins import load_plugins

        load_plugins()
        return importlib.import_module(REGISTRY).ATTENTION_BACKENDS[named]
    except Exception as error:  # A vendor's module may raise any exception while it is imported.
        text, loaded = " ".join(str(error).split()), os.environ.get("SGLANG_PLUGINS") or "none"
        raise DraftmarkError(f"{named} gives no backend: {type(error).__name__}: {text} (plugins: {loaded})") from error


def _checked(found: Any) -> Any:
    """Return a class that derives from SGLang's interface, or a function that makes a backend.

    Raises:
        TypeError: `found` is neither.
    """
    base = importlib.import_module("sglang.srt.layers.attention.base_attn_backend").AttentionBackend
    if not callable(found) or (isinstance(found, type) and not issubclass(found, base)):
        raise TypeError("it does not derive from SGLang's AttentionBackend; name the class of a backend")
    return found


def about(backend: Any) -> str:
    """Return the full name of the class or function, and its distribution with the release."""
    module, name = backend.__module__, backend.__qualname__
    owners = md.packages_distributions().get(module.partition(".")[0], [])
    return f"{module}.{name}" + "".join(f" of {one} {md.version(one)}" for one in owners[:1])


def register(named: str, device: str) -> str:
    """Register the class of a path in SGLang's registry, and return SGLang's name of the backend."""
    found = find(named, device)
    if not is_path(named):
        return named
    importlib.import_module(REGISTRY).ATTENTION_BACKENDS[JUDGED] = found
    return JUDGED


def create(name: str, runner: Any) -> Any:
    """Make the backend on a runner, as SGLang does."""
    return importlib.import_module(REGISTRY).ATTENTION_BACKENDS[name](runner)
