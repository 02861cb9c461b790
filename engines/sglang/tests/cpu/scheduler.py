"""SGLang's own scheduler in a process of its own: forked from one that has imported SGLang, so that a case takes
seconds.

What runs is SGLang's: its arguments, scheduler, loop, workers, pools, allocators and caches. Left out are the
tokenizer and HTTP processes, which `test_server.py` has.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftmark_sglang.in_process import run_until_done, scheduler_of, submit

LIMIT = 1500
"""Seconds after which a case that hangs is ended."""
ON_A_CPU = dict(
    device="cpu",
    dtype="float32",
    mem_fraction_static=0.5,
    max_total_tokens=8192,
    max_running_requests=4,
    disable_cuda_graph=True,
)


def in_a_fork(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a function in a forked process and return what it returns.

    Raises:
        RuntimeError: what it raised, as text.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(send, function, arguments, named))
    process.start()
    send.close()
    try:
        if not receive.poll(LIMIT):
            raise RuntimeError(f"the case took longer than {LIMIT} s")
        kind, answer = receive.recv()
    except EOFError:
        raise RuntimeError("the case's process ended without an answer") from None
    finally:
        process.terminate()
        process.join()
    if kind == "raised":
        raise RuntimeError(answer)
    return answer


def _child(send: Any, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(1)
    try:
        send.send(("returned", function(*arguments, **named)))
    except BaseException:
        send.send(("raised", traceback.format_exc()))
    os._exit(0)


def on_a_cpu(environment: dict[str, str] | None = None, **arguments: Any) -> Any:
    """A small scheduler on a CPU."""
    return scheduler_of(environment, **(ON_A_CPU | arguments))


def generate_on_ranks(
    ranks: int,
    prompts: list[list[int]],
    max_new_tokens: int,
    function: Callable[..., Any] | None = None,
    **arguments: Any,
) -> list[Any]:
    """`generate`, or another function, on every rank of a tensor-parallel run, over gloo: each rank's answer.

    Raises:
        RuntimeError: what ranks raised, of which the first is not always the cause.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = dict(tp_size=ranks, nccl_port=port) | arguments
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)}  # or it wants a NUMA node each
    together["environment"] = bind | arguments.get("environment", {})

    def one(rank: int) -> Any:
        return in_a_fork(function or generate, prompts, max_new_tokens, rank=rank, **together)

    with ThreadPoolExecutor(ranks) as pool:
        answers = [pool.submit(one, rank) for rank in range(ranks)]
    raised = [str(error) for answer in answers if (error := answer.exception()) is not None]
    if raised:
        raise RuntimeError("\n".join(raised))
    return [answer.result() for answer in answers]


def generate(
    prompts: list[list[int]], max_new_tokens: int, environment: dict[str, str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Texts of all prompts, served together, and how many verifications they took."""
    scheduler = on_a_cpu(environment, **arguments)
    requests = submit(scheduler, prompts, max_new_tokens)
    run_until_done(scheduler, requests)
    backend = scheduler.tp_worker.model_runner.attn_backend
    backend = getattr(backend, "full_attn_backend", backend)  # beside layers of another kind it is wrapped
    return {
        "texts": [list(request.output_ids)[:max_new_tokens] for request in requests],
        "verifies": sum(getattr(request, "spec_verify_ct", 0) for request in requests),
        "backend": type(backend).__name__,
        **(_shapes(backend.attention) if hasattr(backend, "attention") else {}),
        "steps_compared": backend._forwards.compared if hasattr(backend, "_forwards") else 0,
    }


def _shapes(attention: Any) -> dict[str, Any]:
    """What differs between the layers that draftmark serves."""
    shapes = list(attention.shapes)
    return {
        "windows": sorted({shape.window_left for shape in shapes}),
        "heads": [(shape.num_qo_heads, shape.num_kv_heads) for shape in shapes],
        "kv_dtypes": sorted({shape.kv_dtype for shape in shapes}),
    }
