"""Tests of guard words (known bytes before and after each tensor that SGLang's code allocates)."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.check import ContractViolation
from draftmark_sglang_judge.guards import GuardWords


def test_write_past_the_end_is_counted() -> None:
    """The check of guard words fails after 280 elements were written past a tensor's end; the error has the number."""
    words = GuardWords()
    with words:
        row = torch.zeros(3, 40, dtype=torch.int32, device="cuda")
    assert row.device.type == "cpu" and row.shape == (3, 40) and not row.any()
    row.as_strided((400,), (1,)).fill_(7)
    with pytest.raises(ContractViolation, match="280 elements were written past the end"):
        words.check("three rows")


def test_write_before_the_start_is_counted() -> None:
    """The check of guard words fails after a write at index -2 of a tensor; the error counts two elements."""
    words = GuardWords()
    with words:
        table = torch.full((4,), -1)
    table.as_strided((1,), (1,), table.storage_offset() - 2).fill_(0)
    with pytest.raises(ContractViolation, match="2 elements were written before the start"):
        words.check("a table")


def test_writes_inside_pass() -> None:
    """The check of guard words passes after writes inside tensors, through the tensor and through a view."""
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


def test_device_tensors_stay_on_the_device() -> None:
    """If the judged device is not a CPU, tensors that SGLang allocates on "cuda" are not moved to the CPU."""
    with GuardWords("meta"), pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda:0" if not torch.cuda.is_available() else "no device")
