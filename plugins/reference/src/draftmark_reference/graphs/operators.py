"""Properties of a dispatched operator, read from its schema and tags."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
# These operators allocate without a kernel, so a replay does not repeat them: memory keeps the previous replay's data.
_UNINITIALISED = (
    *(aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
)


@cache
def is_composite(func: OpOverload) -> bool:
    """Return True if eager torch runs `func` as other operators on every device."""
    name = func.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@cache
def returns_nothing(func: OpOverload) -> bool:
    """Return True if `func` has no result, such as an assertion."""
    return not func._schema.returns


@cache
def is_host_only(func: OpOverload) -> bool:
    """Return True if `func` only allocates, or changes shape and strides in place, and launches nothing."""
    return func.overloadpacket in _UNINITIALISED or torch.Tag.inplace_view in func.tags


def written_operands(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the operands that `func` writes, from in-place operators and ``out=``."""
    named = _written_arguments(func)
    if not named:
        return []
    return tensors_in([args[position] if position < len(args) else kwargs.get(name) for position, name in named])


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested arguments, in order."""
    found: list[Tensor] = []
    _collect(tree, found)
    return found


def _collect(tree: Any, found: list[Tensor]) -> None:
    # Handles common types without pytree, which costs several times the operator itself on a CPU.
    if isinstance(tree, Tensor):
        found.append(tree)
    elif type(tree) in (tuple, list):
        for one in tree:
            _collect(one, found)
    elif type(tree) is dict:
        for one in tree.values():
            _collect(one, found)
    elif type(tree) not in _LEAVES:
        found += [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return a copy of nested arguments with `change` applied to each tensor."""
    if isinstance(tree, Tensor):
        return change(tree)
    if type(tree) in (tuple, list):
        return type(tree)(map_tensors(change, one) for one in tree)
    if type(tree) is dict:
        return {name: map_tensors(change, one) for name, one in tree.items()}
    return tree if type(tree) in _LEAVES else tree_map_only(Tensor, change, tree)


_LEAVES = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
