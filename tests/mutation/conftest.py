"""Fixture of the generator's tests: a function call in a forked process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tools.mutation import pool

Forked = Callable[[Callable[[], Any]], Any]


@pytest.fixture
def forked() -> Iterator[Forked]:
    """Call a function in a forked process and return its result, converted through JSON."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)

    def call(function: Callable[[], Any]) -> Any:
        def work(send: pool.Send) -> None:
            send({"returned": function()})

        ((_, rows, code),) = pool.run(iter([("call", work)]), 1)
        assert code == 0, f"the function ended its process with code {code}; its traceback is above"
        return rows[-1]["returned"]

    yield call
    torch.set_num_threads(before)
