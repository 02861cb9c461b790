"""Finds the memory that a backend keeps: the storages of all tensors that are reachable from it."""

from __future__ import annotations

from typing import Any

import torch


def reachable_storages(owner: object) -> dict[int, str]:
    """Return storages that `owner` reaches through attributes, sequences, sets and dicts: address → a name."""
    found: dict[int, str] = {}
    seen: set[int] = set()
    queue: list[tuple[str, Any]] = [(type(owner).__name__, owner)]
    while queue:
        name, one = queue.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.setdefault(one.untyped_storage().data_ptr(), name)
        elif isinstance(one, dict):
            queue += [(f"{name}[{key!r}]", value) for key, value in one.items()]
        elif isinstance(one, list | tuple | set | frozenset):
            queue += [(f"{name}[{i}]", value) for i, value in enumerate(one)]
        elif type(one).__module__.partition(".")[0] not in ("builtins", "torch"):
            queue += [(f"{name}.{key}", value) for key, value in _attributes(one).items()]
    return found


def _attributes(one: object) -> dict[str, Any]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    held = {name: getattr(one, name) for name in slots if isinstance(name, str) and hasattr(one, name)}
    return {**held, **getattr(one, "__dict__", {})}
