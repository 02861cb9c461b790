"""Operations that a captured region must not contain, and the error text for each.

The rules follow CUDA stream capture (CUDA programming guide, "Prohibited and unhandled operations"; PyTorch's
"CUDA semantics", section CUDA graphs). Two rules are stricter, for graphs of other devices: `one_hot` is refused even
with ``num_classes``. An explicit `torch.Generator` is refused, although CUDA accepts one registered with the graph.

Two checks are needed. Most operations reach torch's dispatcher, and operator tags mark reads of data on the host. Some
operations (`tolist`, `numpy`, `repr`) copy in C++ without a dispatched operator and are visible only as Python calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload

aten = torch.ops.aten


class Rule(NamedTuple):
    """Reason why an operation cannot be captured, and the remedy."""

    why: str
    remedy: str

    def sentence(self, name: str) -> str:
        """Return the error text for the operation `name`."""
        return f"{name} cannot be captured: {self.why}; {self.remedy}"


HOST_READ = Rule(
    "it reads device memory on the host, which waits for the device",
    "keep the value in a tensor, or read it in plan(), outside the graph",
)
DYNAMIC_SIZE = Rule(
    "the size of its output depends on data, which the host would have to read",
    "use a form of fixed size: torch.where, masked_fill, index_select, output_size=, or scatter_ for one_hot",
)
PAGEABLE_COPY = Rule(
    "it copies pageable host memory to the device, which a replay cannot repeat",
    "fill a static tensor before the replay, or build the value on the device (torch.full, torch.arange)",
)
REPOINTED = Rule(
    "it points a tensor at other memory, as Triton's interpreter does when it launches a kernel",
    "launch such kernels through draftmark.runtime.record_call(fn, *args, mutates=...)",
)
OWN_GENERATOR = Rule(
    "a replay does not advance an explicit torch.Generator in the same way on every device",
    "use the default generator, or draw the numbers into a static tensor before the replay",
)
MOVED = Rule(
    "it re-allocates a tensor that existed before capture, so the graph would write to memory without a reader",
    "give it an out= tensor of the final shape",
)

HOST_READS = (
    *("item", "tolist", "cpu", "numpy", "equal", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"),
)
"""Tensor methods that copy values to the host. Methods that read only sizes are recognized by their operator's tags."""
_CALLS: dict[Any, tuple[str, Rule]] = {
    getattr(torch.Tensor, name): (f"Tensor.{name}", HOST_READ) for name in HOST_READS
}
_BUILDERS: dict[Any, str] = {
    torch.tensor: "torch.tensor",
    torch.as_tensor: "torch.as_tensor",
    torch.asarray: "torch.asarray",
    torch.Tensor.new_tensor: "Tensor.new_tensor",
}
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)


def is_judged(func: Callable[..., Any]) -> bool:
    """Return True if `refused_call` refuses some calls of `func`, so each call of `func` must be checked."""
    return func in _CALLS or func in _BUILDERS or func in _SPLITS or func is torch.Tensor.to


def refused_call(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the error text for a Python-level torch call that cannot be captured, or None."""
    if func in _CALLS:
        name, rule = _CALLS[func]
        return rule.sentence(name)
    if func in _SPLITS and any(isinstance(value, torch.Tensor) for value in (*args[1:], *kwargs.values())):
        return HOST_READ.sentence("tensor_split by a tensor")
    # A literal "cpu" copies to the host on any device. A torch.device is allowed: in a CPU test q.device is the CPU.
    if func is torch.Tensor.to and "cpu" in (*_strings(args), *_strings(kwargs.values())):
        return HOST_READ.sentence('Tensor.to("cpu")')
    if func in _BUILDERS and kwargs.get("device") is not None and not isinstance(args[0], torch.Tensor):
        return PAGEABLE_COPY.sentence(f"{_BUILDERS[func]}(..., device=)")
    return None


def refused_operator(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the error text for a dispatched operator that cannot be captured, or None."""
    rule = _operator_rule(func, args, kwargs)
    return rule.sentence(str(func)) if rule else None


def waits_for_the_device(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if an operator returns to the host a value or size that depends on data."""
    return _operator_rule(func, args, kwargs) in (HOST_READ, DYNAMIC_SIZE)


def _operator_rule(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Rule | None:
    if _is_always_allowed(func):
        return None
    packet = func.overloadpacket
    if packet is aten.set_:
        return REPOINTED
    # torch lifts the 5. of `x[0] = 5.` to a tensor of 0 dimensions. It is allowed: filling a row takes it as a kernel
    # argument.
    if packet is aten.lift_fresh and args[0].dim() > 0:
        return PAGEABLE_COPY
    if torch.Tag.data_dependent_output in func.tags:
        return HOST_READ
    if torch.Tag.dynamic_output_shape in func.tags and _has_dynamic_size(func, args, kwargs):
        return DYNAMIC_SIZE
    if packet in _INDEX_PUTS and _has_mask(args[1]):
        # `x[mask] = 0.` runs as a masked fill on the device. With a tensor of values, the host must read the number
        # of selected elements.
        return DYNAMIC_SIZE if args[2].dim() > 0 else None
    if any(isinstance(value, torch.Generator) for value in (*args, *kwargs.values())):
        return OWN_GENERATOR
    return None


_INDEX_PUTS = (aten.index_put, aten.index_put_, aten._index_put_impl_)


@cache
def _is_always_allowed(func: OpOverload) -> bool:
    """Return True if `_operator_rule` allows every call of `func`. Most calls are of such operators."""
    if func.overloadpacket in (aten.set_, aten.lift_fresh, *_INDEX_PUTS):
        return False
    if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
        return False
    return not any("Generator" in str(argument.type) for argument in func._schema.arguments)


def _has_dynamic_size(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if func.overloadpacket is aten.index:
        return _has_mask(args[1])
    return kwargs.get("output_size") is None  # repeat_interleave with output_size reads no host data


def _has_mask(indices: Iterable[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _strings(values: Iterable[Any]) -> list[str]:
    return [value for value in values if isinstance(value, str)]
