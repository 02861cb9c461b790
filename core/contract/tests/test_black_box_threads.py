"""Tests of the black-box program: the device of the threads that make its calls."""

from __future__ import annotations

import pytest
import torch

from draftmark_contract.black_box import program


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_a_thread_gets_an_index_of_the_device(monkeypatch: pytest.MonkeyPatch, device: str, index: int) -> None:
    """Each new thread selects its device by an index, because torch refuses a CUDA device without one."""
    selected: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    assert program._caller(True, device)(lambda: "called") == "called"
    assert selected == [index]
