"""Guard words around what foreign code allocates."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import ContractViolation
from draftmark_sglang.judge.guards import GuardWords


def test_a_write_behind_the_end_is_counted() -> None:
    """A kernel that writes 280 entries too many is found, with their number."""
    words = GuardWords()
    with words:
        row = torch.zeros(3, 40, dtype=torch.int32, device="cuda")
    assert row.device.type == "cpu" and row.shape == (3, 40) and not row.any()
    row.as_strided((400,), (1,)).fill_(7)
    with pytest.raises(ContractViolation, match="280 elements were written behind its end"):
        words.check("three rows")


def test_a_write_before_the_beginning_is_counted() -> None:
    """An index of -2 is found."""
    words = GuardWords()
    with words:
        table = torch.full((4,), -1)
    table.as_strided((1,), (1,), table.storage_offset() - 2).fill_(0)
    with pytest.raises(ContractViolation, match="2 elements were written before it"):
        words.check("a table")


def test_writes_within_are_none_of_its_business() -> None:
    """Whatever a tensor holds, in whole and in views."""
    words = GuardWords()
    with words:
        buffer = torch.empty(2, 8, dtype=torch.int64)
        nothing = torch.empty(0)
        mask = torch.zeros(6, 98, dtype=torch.bool)
    mask.fill_(True)
    buffer.fill_(0x5A)
    buffer[1].zero_()
    words.check("a buffer")
    assert nothing.numel() == 0 and len(words.tensors) == 3


def test_what_is_judged_on_a_device_stays_there() -> None:
    """On a CPU alone is what an old release asks of CUDA by name put elsewhere."""
    with GuardWords("meta"), pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda:0" if not torch.cuda.is_available() else "no device")
