"""SGLang's own `Scheduler` in this process, so that pools, runners and backends are made as SGLang makes them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from .model_files import write_models
from .setups import REQUESTS, Setup

ARGUMENTS = dict(
    dtype="float32",
    mem_fraction_static=0.5,
    max_total_tokens=2048,
    max_running_requests=REQUESTS,
    disable_cuda_graph=True,
    load_format="dummy",
    skip_tokenizer_init=True,
    log_level="error",
    random_seed=0,
    sampling_backend="pytorch",
    grammar_backend="none",
    triton_attention_num_kv_splits=2,
)


def scheduler_for(setup: Setup, backend: str, device: str, folder: Path) -> Any:
    """A scheduler with one of SGLang's attention backends, for a tiny model that is written into `folder`."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.server_args import PortArgs, ServerArgs

    target, head = write_models(folder)
    arguments = ARGUMENTS | dict(
        model_path=str(target), attention_backend=backend, page_size=setup.page_size, device=device
    )
    if setup.speculates:
        arguments |= dict(
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=str(head),
            speculative_eagle_topk=setup.topk,
            speculative_num_steps=setup.num_steps,
            speculative_num_draft_tokens=setup.num_draft_tokens,
        )
    server_args = ServerArgs(**arguments)
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    ranks = _publish(server_args, inspect.signature(Scheduler.__init__).parameters)
    return Scheduler(server_args=server_args, port_args=PortArgs.init_new(server_args), **ranks)


def _publish(server_args: Any, named: Any) -> dict[str, Any]:
    """Make the arguments the process's own. Ranks are the scheduler's arguments in 0.5.17, and published later on."""
    from sglang.srt import runtime_context

    if "gpu_id" in named:
        runtime_context.publish(server_args, role="scheduler")
        ranks = {name: 0 for name in named if name.endswith("_rank") or name == "gpu_id"}
        return ranks | dict(dp_rank=None)
    alone = runtime_context.SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0)
    runtime_context.publish(server_args, role="scheduler", ranks=alone)
    return {}
