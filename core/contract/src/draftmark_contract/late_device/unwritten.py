"""Builds the result of an operator that has not run yet: tensors of the right shape, filled with poison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from draftmark_reference.graphs.ledger import poison_byte, storage_bytes
from draftmark_reference.graphs.operators import map_tensors

Signature = tuple[Any, ...]
_SHAPES: dict[Signature, Any] = {}
"""Shapes of results by operator and operands, cached since a meta kernel can cost as much as hundreds of real ones."""


def unwritten(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of ``func(*args, **kwargs)`` before it has run.

    An operand that the operator writes in place is returned as is. Every other tensor is new, filled with poison.

    Raises:
        NotImplementedError: torch cannot compute shapes for this operator.
    """
    schema = func._schema
    written = [_written(one, func, args, kwargs) for one in schema.returns]
    if not written:
        return None
    if all(one is not None for one in written):
        _grow(func, args, kwargs)
        return written[0] if len(written) == 1 else tuple(written)
    shapes = _shapes(func, args, kwargs)
    if len(written) == 1:
        return map_tensors(_fresh, shapes)
    pairs = zip(written, shapes, strict=True)
    return tuple(map_tensors(_fresh, shape) if mine is None else mine for mine, shape in pairs)


def _written(returned: Any, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the operand that this return value aliases, or None if the return value is a new tensor."""
    if returned.alias_info is None or not returned.alias_info.is_write:
        return None
    for position, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.before_set == returned.alias_info.before_set:
            return args[position] if position < len(args) else kwargs[argument.name]
    return None


def _grow(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Resize an empty ``out=`` tensor to its final shape, as the launch of the operator would."""
    empty = {name: one for name, one in kwargs.items() if isinstance(one, Tensor) and not one.numel()}
    if empty:
        results = _shapes(func, args, kwargs)
        leaves = [results] if isinstance(results, Tensor) else list(results)
        for one, shape in zip(empty.values(), leaves, strict=False):
            one.resize_(shape.shape)


def _shapes(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    key = (func, _signature(args), _signature(kwargs))
    if key not in _SHAPES:
        kwargs = {**kwargs, "device": torch.device("meta")} if kwargs.get("device") is not None else kwargs
        args, kwargs = map_tensors(_meta, (args, dict(kwargs)))
        _SHAPES[key] = func(*args, **kwargs)
    return _SHAPES[key]


def _meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _fresh(shape: Tensor) -> Tensor:
    made = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    storage_bytes(made).fill_(poison_byte(made.dtype))
    return made


def _signature(tree: Any) -> Signature:
    """Return a hashable key of all arguments that decide output shapes: tensor layouts, and typed numbers."""
    if isinstance(tree, Tensor):
        return (tuple(tree.shape), tree.stride(), tree.dtype)
    if isinstance(tree, Mapping):
        return tuple((name, _signature(one)) for name, one in tree.items())
    if isinstance(tree, (list, tuple)):
        return tuple(_signature(one) for one in tree)
    return (type(tree), tree)
