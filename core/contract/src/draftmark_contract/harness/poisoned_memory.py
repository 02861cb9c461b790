"""Poisons the memory of an opened backend while another backend runs, and checks that it does not change."""

from __future__ import annotations

import torch

from draftmark.arena import POISON_BYTE, Arena

from ..check import ContractViolation
from .tensors import CaseTensors
from .watch import bits_of


class PoisonedMemory:
    """Poisons an arena and its case tensors. Buffers that must start as zeros are restored afterwards."""

    def __init__(self, arena: Arena, tensors: CaseTensors) -> None:
        static = {f"static {name}": one for name, one in vars(tensors.buffers).items() if isinstance(one, torch.Tensor)}
        rows = {name: one for name in ("q", "k", "v", "out") if (one := getattr(tensors, name)) is not None}
        self._given = {**static, **rows, **{f"cache.{name}": one for name, one in tensors.stored.items()}}
        self._arena = {f"buffer {name}": arena[name] for name in arena}
        zeros = [spec.name for spec in arena.specs if spec.zeros]
        self._kept = {name: arena[name].clone() for name in zeros}
        self._back = arena
        for one in (*self._arena.values(), *self._given.values()):
            bits_of(one).fill_(POISON_BYTE)

    def assert_untouched(self, when: str) -> None:
        """Check that all of the memory is still poison, then restore the buffers that must start as zeros.

        Raises:
            ContractViolation: something wrote to the memory.
        """
        for name, one in (self._arena | self._given).items():
            written = (bits_of(one) != POISON_BYTE).nonzero()
            if written.numel():
                raise ContractViolation(
                    f"{name} of an opened backend was written {when}",
                    got=f"the first of {len(written)} bytes at {int(written[0, 0])}",
                    expected="every open writes only its own arena and the tensors that it is given",
                    formula="draftmark.backend.AttentionBackend: a plugin keeps only views of its arena",
                    bug="flashinfer#4014, vllm#48261",
                    remedy="keep tensors, addresses and plans on the backend, not in globals or closures of a module",
                )
        for name, before in self._kept.items():
            self._back[name].copy_(before)
