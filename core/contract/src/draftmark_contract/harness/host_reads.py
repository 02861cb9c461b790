"""Detects host code that reads a device tensor. It also works on a CPU, where this read would not wait.

The tensors of the batch are tainted, and so is every result computed from them. A read of a tainted tensor's values on
the host would wait for a real device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftmark_reference.graphs.rules import HOST_READS

READS = frozenset(getattr(torch.Tensor, name) for name in (*HOST_READS, "nonzero", "__iter__"))
"""Calls that a captured region must not make, and two more that wait for the device outside of a capture."""


class _Taint:
    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._keep = [tensor.detach() for tensor in tensors]
        self._storages = {one.untyped_storage().data_ptr() for one in self._keep}
        self.reads: list[str] = []

    def touches(self, values: Any) -> bool:
        leaves = (one for one in tree_leaves(values) if isinstance(one, torch.Tensor))
        return any(one.untyped_storage().data_ptr() in self._storages for one in leaves)

    def spread(self, values: Any) -> None:
        for one in tree_leaves(values):
            if isinstance(one, torch.Tensor):
                self._keep.append(one.detach())
                self._storages.add(one.untyped_storage().data_ptr())


class _Calls(TorchFunctionMode):
    def __init__(self, taint: _Taint) -> None:
        super().__init__()
        self._taint = taint

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS and self._taint.touches(args[:1]):
            self._taint.reads.append(f"Tensor.{func.__name__}")
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, taint: _Taint) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._taint = taint

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: no code is compiled here, and dynamo's wrapper slows every operator."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tainted = self._taint.touches((args, kwargs))
        if tainted and _waits(func, args, kwargs or {}):
            self._taint.reads.append(str(func))
        result = func(*args, **(kwargs or {}))
        if tainted:
            self._taint.spread(result)
        return result


def _waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if the operator's result, or the size of its result, depends on tensor data at the call."""
    if torch.Tag.data_dependent_output in func.tags:
        return True
    if torch.Tag.dynamic_output_shape not in func.tags or kwargs.get("output_size") is not None:
        return False
    if func.overloadpacket is not torch.ops.aten.index:
        return True
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])


@contextmanager
def host_reads(tensors: Iterable[torch.Tensor]) -> Iterator[list[str]]:
    """Collect the names of calls that read `tensors`, or anything computed from them, on the host."""
    taint = _Taint(tensors)
    with _Calls(taint), _Operators(taint):
        yield taint.reads
