"""Two processes with a gloo group, for tests of tensor-parallel ranks."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from typing import Any

LONGEST_S = 120
"""Longest wait for a result, so that a rank without one does not hold the tests."""


def results_of_two_ranks(work: Callable[[int, Any], None], each: int = 1) -> list[Any]:
    """Run ``work(rank, results)`` in two processes of one gloo group; return what they put into the queue `results`.

    Args:
        work: function of a module, since the processes import it.
        each: results of one rank.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(work, rank, port, results)) for rank in range(2)]
    for one in ranks:
        one.start()
    found = [results.get(timeout=LONGEST_S) for _ in range(each * len(ranks))]
    for one in ranks:
        one.join()
    return found


def _rank(work: Callable[[int, Any], None], rank: int, port: int, results: Any) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    work(rank, results)
    dist.destroy_process_group()
