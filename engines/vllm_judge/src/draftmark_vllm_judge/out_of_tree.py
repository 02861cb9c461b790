"""Backends from outside of vLLM: a class of any package, or the backend that an installed plugin registers or selects.

Names are resolved in two steps. `is_named` reads vLLM's registry as text, because the command must not import vLLM.
`find` imports vLLM, its plugins and the class, in the process that judges.
"""

from __future__ import annotations

import importlib
import importlib.metadata as md
import importlib.util
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftmark.errors import DraftmarkError

from .sequence_memory import is_memory

GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""vLLM's groups of plugins that can bring an attention backend."""
OWN = "draftmark-vllm"
METHODS = ("get_impl_cls", "get_builder_cls")
"""Methods of vLLM's `AttentionBackend` that the judge calls on the class."""
REGISTRIES = ("v1/attention/backends/registry.py", "attention/backends/registry.py")
"""Files in vLLM's package with its registry, the newest place first."""
CUSTOM = "CUSTOM"
"""vLLM's name for one external backend. Here it is also the backend that a plugin's platform selects."""


def plugins() -> list[str]:
    """Return the names of the installed plugins that can bring a backend, without this adapter's own."""
    found = [one for group in GROUPS for one in md.entry_points(group=group)]
    return sorted({one.name for one in found if one.dist is None or one.dist.name != OWN})


def environment() -> Mapping[str, str]:
    """Return the variable that makes vLLM load these plugins only. A value that the user has set is kept."""
    return {"VLLM_PLUGINS": os.environ.get("VLLM_PLUGINS", ",".join(plugins()))}


def is_path(named: str) -> bool:
    """Return True for ``"package.module.Class"`` and ``"package.module:Class"``."""
    return bool(re.fullmatch(r"\w+(\.\w+)*[.:]\w+", named))


def is_named(named: str) -> bool:
    """Return True for a class path, a name of vLLM's registry, and any name if a plugin can have registered it."""
    return is_path(named) or named in _registered() or (bool(plugins()) and named.isidentifier() and named.isupper())


def _registered() -> set[str]:
    """Return the names in vLLM's registry, from its source text."""
    spec = importlib.util.find_spec("vllm")
    for folder in spec.submodule_search_locations or () if spec else ():
        for place in REGISTRIES:
            file = Path(folder, place)
            if file.exists():
                return set(re.findall(r"^    ([A-Z][A-Z0-9_]*) = ", file.read_text(encoding="utf-8"), re.MULTILINE))
    return set()


def find(named: str) -> Any:
    """Load the plugins and return the class: a backend, or a `SequenceMemory`.

    Raises:
        DraftmarkError: there is no such class or registered name, or its import fails.
    """
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    try:
        found = _imported(named) if is_path(named) else _by_name(named)
        backend = found.backend if is_memory(found) else found
        if lacking := [one for one in METHODS if not callable(getattr(backend, one, None))]:
            raise TypeError(f"it has no {' and no '.join(lacking)}; name a class that derives from AttentionBackend")
    except (ImportError, AttributeError, KeyError, TypeError, ValueError, OSError, RuntimeError) as error:
        text = " ".join(str(error).split())
        loaded = os.environ.get("VLLM_PLUGINS") or "none"
        raise DraftmarkError(f"{named} gives no backend: {type(error).__name__}: {text} (plugins: {loaded})") from error
    if getattr(found, "is_ssm", lambda: False)():
        raise DraftmarkError(f"{named} keeps recurrent state; of such backends, GDN_ATTN and MAMBA2_ATTN are judged")
    return found


def about(backend: Any) -> str:
    """Return the backend's full name, and its distribution with the release."""
    module, name = backend.__module__, backend.__qualname__
    owners = md.packages_distributions().get(module.partition(".")[0], [])
    return f"{module}.{name}" + "".join(f" of {one} {md.version(one)}" for one in owners[:1])


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(":" if ":" in path else ".")
    return getattr(importlib.import_module(module), name)


def _by_name(named: str) -> Any:
    try:
        return backend_class(named)
    except ValueError:
        if named != CUSTOM:
            raise
        return _selected_by_platform()


def backend_class(name: str) -> Any:
    """Return vLLM's class for a backend's name, from vLLM's registry.

    Raises:
        ImportError, KeyError, AttributeError, ValueError: this release has no such backend, or its import fails.
    """
    from .api import BackendEnum

    member = BackendEnum[name]
    if hasattr(member, "get_class"):
        return member.get_class()
    from vllm.utils.import_utils import resolve_obj_by_qualname

    return resolve_obj_by_qualname(member.get_path())


def _selected_by_platform() -> Any:
    """Return the class that a plugin's platform selects for an ordinary decoder layer.

    Raises:
        ValueError: the platform is vLLM's own.
    """
    import torch
    from vllm.platforms import current_platform

    from .api import first_of
    from .config import takes

    if type(current_platform).__module__.partition(".")[0] == "vllm":
        raise ValueError(
            "no plugin registers a backend as CUSTOM or selects one by its platform; "
            "name the class: vllm:package.module.Class"
        )
    config = first_of(
        "vllm.v1.attention.selector:AttentionSelectorConfig", "vllm.attention.selector:AttentionSelectorConfig"
    )
    values = {"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 16}
    arguments = {"attn_selector_config": config(**values), "num_heads": 8}
    select = current_platform.get_attn_backend_cls
    found = select(None, **takes(select, arguments))
    return _imported(found) if isinstance(found, str) else found
