"""What a dispatched operator's schema says about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
# They launch no kernel: a replay finds the memory as the last replay left it.
_UNINITIALISED = (
    *(aten.empty, aten.empty_like, aten.empty_permuted, aten.empty_strided),
    *(aten.new_empty, aten.new_empty_strided),
)


@cache
def is_composite(func: OpOverload) -> bool:
    """Whether eager torch would run `func` as other operators, whatever the device."""
    name = func.name()  # type: ignore[no-untyped-call]
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"))


@cache
def is_host_only(func: OpOverload) -> bool:
    """Whether `func` only allocates, or changes shape and strides in place: nothing is launched on a device."""
    return func.overloadpacket in _UNINITIALISED or torch.Tag.inplace_view in func.tags


def written_operands(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that `func` writes: those of in-place operators and of ``out=``."""
    named = _written_arguments(func)
    return tensors_in([args[position] if position < len(args) else kwargs.get(name) for position, name in named])


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of a nest of arguments, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    return tuple(
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )
