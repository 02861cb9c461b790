"""SGLang's own scheduler in a separate process for each case.

The process is forked from one that has imported SGLang, so a case takes seconds. It runs SGLang's arguments, scheduler,
event loop, workers, pools, allocators and caches. The tokenizer and HTTP processes run only in `test_server.py`.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from draftmark_sglang_judge.in_process import run_until_done, scheduler_of, submit

LIMIT = 1500
"""Time limit of a case in seconds."""
ON_A_CPU = dict(
    device="cpu",
    dtype="float32",
    mem_fraction_static=0.5,
    max_total_tokens=8192,
    max_running_requests=4,
    disable_cuda_graph=True,
)


def in_a_fork(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Run a function in a forked process and return its result.

    Raises:
        RuntimeError: the function raised an error. The message is its traceback.
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
        raise RuntimeError("the case's process ended without a result") from None
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
    """Create a small scheduler on a CPU."""
    return scheduler_of(environment, **(ON_A_CPU | arguments))


def generate_on_ranks(
    ranks: int,
    prompts: list[list[int]],
    max_new_tokens: int,
    function: Callable[..., Any] | None = None,
    **arguments: Any,
) -> list[Any]:
    """Run `generate`, or another function, on every rank of a tensor-parallel run over gloo; return all results.

    Raises:
        RuntimeError: a rank raised an error. The message has all ranks' errors; the first is not always the cause.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = dict(tp_size=ranks, nccl_port=port) | arguments
    # All ranks use CPU core 0, because SGLang's default needs one NUMA node per rank.
    bind = {"SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * ranks)}
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
    """Serve all prompts together; return their output tokens, the number of verify steps, and facts of the backend."""
    scheduler = on_a_cpu(environment, **arguments)
    requests = submit(scheduler, prompts, max_new_tokens)
    run_until_done(scheduler, requests)
    backend = scheduler.tp_worker.model_runner.attn_backend
    backend = getattr(backend, "full_attn_backend", backend)  # SGLang wraps it if some layers are not attention
    return {
        "texts": [list(request.output_ids)[:max_new_tokens] for request in requests],
        "verifies": sum(getattr(request, "spec_verify_ct", 0) for request in requests),
        "backend": type(backend).__name__,
        **(_shapes(backend.attention) if hasattr(backend, "attention") else {}),
        "steps_compared": backend._comparison.compared if hasattr(backend, "_comparison") else 0,
        "state_shape": backend.states.geometry.state if getattr(backend, "states", None) is not None else None,
    }


def _shapes(attention: Any) -> dict[str, Any]:
    """Return the parts of the layers' shapes that tests compare."""
    shapes = list(attention.shapes)
    return {
        "windows": sorted({shape.window_left for shape in shapes}),
        "heads": [(shape.num_qo_heads, shape.num_kv_heads) for shape in shapes],
        "kv_dtypes": sorted({shape.kv_dtype for shape in shapes}),
    }
