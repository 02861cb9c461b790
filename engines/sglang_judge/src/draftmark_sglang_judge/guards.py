"""Guard words around the tensors that SGLang allocates, to detect writes outside of a tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from draftmark_contract.check import ContractViolation

GUARD = 4096
"""Elements of guard words on each side of a tensor."""
BYTE = 0x5A
FACTORIES = (torch.empty, torch.zeros, torch.ones, torch.full)


@dataclass(frozen=True)
class Guarded:
    """Holds one guarded tensor: `inner` is the tensor, `around` its memory with guard words on both sides."""

    around: torch.Tensor
    inner: torch.Tensor

    def written_past_end(self) -> int:
        """Return the number of elements from the tensor's end to the last changed guard word."""
        touched = self._touched(self.around[GUARD + self.inner.numel() :])
        return int(touched[-1]) + 1 if len(touched) else 0

    def written_before_start(self) -> int:
        """Return the number of elements from the first changed guard word to the tensor's start."""
        touched = self._touched(self.around[:GUARD])
        return GUARD - int(touched[0]) if len(touched) else 0

    @staticmethod
    def _touched(words: torch.Tensor) -> torch.Tensor:
        """Return the indices of changed guard words.

        Bytes are compared, because torch turns every non-zero byte of a bool into one.
        """
        return (words.view(torch.uint8).view(-1, words.element_size()) != BYTE).any(1).nonzero()


class GuardWords(TorchFunctionMode):
    """Torch function mode that adds guard words to every new tensor.

    Args:
        device: device that is judged. If it is a CPU, tensors for CUDA or an NPU are allocated on the CPU. Old SGLang
            releases need that: they write ``device="cuda"`` where newer releases use the runner's device.
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
        """Raise an error for the first tensor with changed guard words.

        Raises:
            ContractViolation: the error names the tensor and the number of elements.
        """
        for one in self.tensors:
            for where, count in (
                ("past the end", one.written_past_end()),
                ("before the start", one.written_before_start()),
            ):
                if count:
                    shape = list(one.inner.shape)
                    raise ContractViolation(
                        f"{count} elements were written {where} of a {one.inner.dtype} tensor {shape}",
                        batch=batch,
                        got=f"{count} elements past {one.inner.numel()}",
                        expected="none",
                        bug=bug,
                    )
