"""Tensors with guard words around them, for code that allocates its own: whatever is written past an end shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from draftmark_contract.check import ContractViolation

GUARD = 4096
"""Elements on either side of each tensor."""
BYTE = 0x5A
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full)


@dataclass(frozen=True)
class Guarded:
    """One tensor: the memory around it, and its number of elements."""

    around: torch.Tensor
    inner: torch.Tensor

    def written_behind(self) -> int:
        """Elements behind its end up to the last that was written."""
        touched = self._touched(self.around[GUARD + self.inner.numel() :])
        return int(touched[-1]) + 1 if len(touched) else 0

    def written_before(self) -> int:
        """Elements before its beginning from the first that was written."""
        touched = self._touched(self.around[:GUARD])
        return GUARD - int(touched[0]) if len(touched) else 0

    @staticmethod
    def _touched(words: torch.Tensor) -> torch.Tensor:
        """Elements whose bytes are not as they were; in bytes, for torch makes any byte of a bool a one."""
        return (words.view(torch.uint8).view(-1, words.element_size()) != BYTE).any(1).nonzero()


class GuardWords(TorchFunctionMode):
    """While active, gives every new tensor guard words.

    Args:
        device: what is judged on. Where that is a CPU, what is asked for on another device is put there: an old
            release asks for ``device="cuda"`` by name, where a newer one asks its runner.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.tensors: list[Guarded] = []
        self._on_a_cpu = device == "cpu"

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if self._on_a_cpu and str(kwargs.get("device", "")).startswith(("cuda", "npu")):
            kwargs["device"] = "cpu"
        made = func(*args, **kwargs)
        if (
            func not in FACTORIES
            or kwargs.get("pin_memory")
            or made.layout is not torch.strided
            or not made.is_contiguous()
        ):
            return made
        return self._guarded(made)

    def _guarded(self, made: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            around = made.new_empty(made.numel() + 2 * GUARD)
            around.view(torch.uint8).fill_(BYTE)
            inner = around[GUARD : GUARD + made.numel()].view(made.shape)
            inner.copy_(made)
        self.tensors.append(Guarded(around, inner))
        return inner

    def check(self, batch: str, bug: str = "") -> None:
        """Raise at the first tensor around which something was written.

        Raises:
            ContractViolation: which, and how far.
        """
        for one in self.tensors:
            for where, count in (("behind its end", one.written_behind()), ("before it", one.written_before())):
                if count:
                    shape = list(one.inner.shape)
                    raise ContractViolation(
                        f"{count} elements were written {where}: of a {one.inner.dtype} tensor {shape}",
                        batch=batch,
                        got=f"{count} elements past {one.inner.numel()}",
                        expected="none",
                        bug=bug,
                    )
