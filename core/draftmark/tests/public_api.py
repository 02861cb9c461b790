"""The public API as text: every public name of the three public modules with its signature.

``python core/draftmark/tests/public_api.py`` rewrites ``public_api.txt``; its diff shows what changed for users.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from enum import Enum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

MODULES = ("draftmark", "draftmark.runtime", "draftmark_tools.models")
"""Public modules; all other modules are internal."""
OPERATORS = ("__getitem__", "__iter__")
"""Special methods that callers use through their operators."""
FILE = Path(__file__).with_name("public_api.txt")


def api_text() -> str:
    """Return the whole API, one name per line."""
    modules = [importlib.import_module(name) for name in MODULES]
    counts = ", ".join(f"{len(module.__all__)} names in {module.__name__}" for module in modules)
    head = f"# {counts}; written by core/draftmark/tests/public_api.py"
    return "\n\n".join([head, *map(_module, modules)]) + "\n"


def _module(module: ModuleType) -> str:
    return "\n".join([f"{module.__name__}:", *(_name(name, getattr(module, name)) for name in sorted(module.__all__))])


def _name(name: str, value: Any) -> str:
    if not isinstance(value, type):
        shown = _signature(value) if inspect.isfunction(value) else f": {type(value).__name__}"
        return f"  {name}{shown}"
    if issubclass(value, Enum):
        return f"  {name}: {' | '.join(member.name for member in value)}"
    public = {public for module in MODULES for public in importlib.import_module(module).__all__}
    bases = ", ".join(base.__name__ for base in value.__bases__ if base.__name__ in public)
    # Members of a base without a public name are the class's own for users.
    parts = [one for one in value.__mro__ if one is value or (_is_ours(one) and one.__name__ not in public)]
    own = {name: member for part in reversed(parts) for name, member in vars(part).items()}
    init = "" if "__init__" not in own or getattr(value, "_is_protocol", False) else _signature(value.__init__)
    head = f"  class {name}{f'[{bases}]' if bases else ''}{init}"
    return "\n".join([head, *(f"    {line}" for line in _members(value, own))])


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("draftmark", "draftmark_tools")


def _members(kind: type, own: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a class's own members, without hooks."""
    fields = getattr(kind, "_fields", ())
    if fields:
        yield f"fields: {', '.join(fields)}"
    for name, value in sorted(own.items()):
        public = not name.startswith(("_", "draftmark_")) or name in OPERATORS
        if not (public or getattr(value, "__isabstractmethod__", False)) or name in fields:
            continue
        if isinstance(value, property | cached_property):
            yield f".{name}: {_annotation(value)}"
        elif isinstance(value, classmethod | staticmethod):
            yield f"{type(value).__name__} .{name}{_signature(value.__func__)}"
        elif inspect.isfunction(value):
            yield f".{name}{_signature(value)}"


def _annotation(value: property | cached_property[Any]) -> str:
    read = value.fget if isinstance(value, property) else value.func
    return str(inspect.signature(read).return_annotation) if read else ""


class _Bare(str):
    """An annotation that is already a string, printed without quotes."""

    __repr__ = str.__str__


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=_Bare(one.annotation)) for one in signature.parameters.values()]
    shown = [one for one in parameters if one.name not in ("self", "cls")]
    return str(signature.replace(parameters=shown, return_annotation=_Bare(signature.return_annotation)))


if __name__ == "__main__":
    FILE.write_text(api_text())
    print(f"wrote {FILE}")
