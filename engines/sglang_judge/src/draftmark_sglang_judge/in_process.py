"""Functions to run SGLang's own scheduler in this process, without tokenizer and HTTP processes.

The judge, the benchmarks and the tests use them.
"""

from __future__ import annotations

import array
import inspect
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def scheduler_of(
    environment: dict[str, str] | None = None, rank: int = 0, *, plugins: bool = True, **arguments: Any
) -> Any:
    """Create SGLang's `Scheduler` with these server arguments, ready to run batches.

    Args:
        environment: environment variables to set first.
        rank: tensor-parallel rank. All ranks get the same requests, except with DP attention, where each group of ranks
            gets its own requests.
        plugins: whether SGLang loads its plugins; False to judge SGLang's own backends.
        arguments: fields of `ServerArgs`.
    """
    os.environ.update(environment or {})
    if plugins:
        from sglang.srt.plugins import load_plugins

        load_plugins()
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    defaults = dict(skip_tokenizer_init=True, log_level="error", random_seed=0)
    defaults |= dict(sampling_backend="pytorch", grammar_backend="none")
    server_args = ServerArgs(**(defaults | arguments))
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    dp_rank = rank * server_args.dp_size // server_args.tp_size if server_args.enable_dp_attention else None
    ranks = _publish(server_args, inspect.signature(Scheduler.__init__).parameters, rank, dp_rank)
    # With a port for each DP rank, SGLang does not check that all ports are free. Another rank may already use one.
    worker_ports = None if dp_rank is None else [0] * server_args.dp_size
    ports = PortArgs.init_new(server_args, dp_rank, worker_ports)
    return Scheduler(server_args=server_args, port_args=ports, **ranks)


def _publish(server_args: Any, named: Any, rank: int, dp_rank: int | None) -> dict[str, Any]:
    """Set the server arguments as SGLang's process-wide ones, and return the `Scheduler` arguments for the ranks.

    `Scheduler` takes ranks as arguments in 0.5.17; later releases read the published ones.
    """
    from sglang.srt import runtime_context

    if "gpu_id" in named:
        runtime_context.publish(server_args, role="scheduler")
        ranks = {name: 0 for name in named if name.endswith("_rank") or name == "gpu_id"}
        return ranks | dict(tp_rank=rank, gpu_id=rank, dp_rank=dp_rank)
    ours = runtime_context.SpawnRanks(world_rank=rank, dp_rank=dp_rank, gpu_id=rank)
    runtime_context.publish(server_args, role="scheduler", ranks=ours)
    return {}


def eagle_arguments(head: Path | str, topk: int, num_steps: int, num_draft_tokens: int) -> dict[str, Any]:
    """Return the server arguments for an EAGLE head: draft trees, or chains if topk is 1."""
    return dict(
        speculative_algorithm="EAGLE",
        speculative_draft_model_path=str(head),
        speculative_eagle_topk=topk,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_draft_tokens,
    )


def submit(scheduler: Any, prompts: list[list[int]], max_new_tokens: int, name: str = "request") -> list[Any]:
    """Submit prompts to a scheduler, and return SGLang's `Req` object of each prompt."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    before = len(scheduler.waiting_queue)
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_new_tokens=max_new_tokens, temperature=0.0, ignore_eos=True)
        sampling.normalize(None)
        request = TokenizedGenerateReqInput(
            rid=f"{name}-{number}",
            input_text=None,
            input_ids=array.array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )
        scheduler.process_input_requests([request])
    return list(scheduler.waiting_queue)[before:]


def run_until_done(
    scheduler: Any, requests: list[Any], each_turn: Callable[[], None] = lambda: None, idle_turns: int = 50
) -> None:
    """Run SGLang's own event loop, plain or overlapped, until these requests have ended and no batch is in flight.

    Args:
        each_turn: called at the start of each turn of the event loop.
        idle_turns: turns in a row without a batch after which the run fails.

    Raises:
        RuntimeError: requests wait, but no batch has run for `idle_turns` turns.
    """
    idle = 0

    def receive(**_: Any) -> list[Any]:
        nonlocal idle
        each_turn()
        scheduler.gracefully_exit = not scheduler.last_batch and all(request.finished() for request in requests)
        idle = 0 if scheduler.last_batch else idle + 1
        if idle >= idle_turns:
            raise RuntimeError(f"requests wait, but no batch has run for {idle_turns} turns of the event loop")
        return []

    scheduler.request_receiver = SimpleNamespace(recv_requests=receive)
    scheduler.gracefully_exit = False
    scheduler.run_event_loop()
