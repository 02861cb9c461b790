"""Start of SGLang's `Scheduler` in this process, so that SGLang itself creates pools, runners and backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from draftmark_contract.judge.devices import device_of

from .in_process import eagle_arguments, scheduler_of
from .model_files import write_mla_models, write_models
from .outside import DRAFT_BACKEND
from .setups import MLA, REQUESTS, Setup, heads_on

ARGUMENTS = dict(
    mem_fraction_static=0.5,
    max_total_tokens=2048,
    max_running_requests=REQUESTS,
    disable_cuda_graph=True,
    load_format="dummy",
    triton_attention_num_kv_splits=2,
)


def scheduler_for(setup: Setup, target: str, device: str, folder: Path, outside: str = "") -> Any:
    """Create a scheduler with an attention backend, for a tiny model that is written to `folder`.

    Args:
        outside: SGLang's name of a backend from outside; "" for SGLang's own.
    """
    heads = heads_on(device, target)
    model, head = (write_mla_models if target in MLA else write_models)(folder, heads)
    arguments: dict[str, Any] = ARGUMENTS | dict(
        model_path=str(model),
        attention_backend=outside or MLA.get(target, target),
        page_size=setup.page_size,
        device=device,
        dtype=heads.dtype,
    )
    if target in MLA and device_of(device).host:
        # A model that shares weights with its MTP layer waits for the GPU, also where there is none.
        torch.cuda.synchronize = lambda *_: None
    if setup.speculates:
        arguments |= eagle_arguments(head, setup.topk, setup.num_steps, setup.num_draft_tokens)
        if outside:
            arguments["speculative_draft_attention_backend"] = DRAFT_BACKEND
    return scheduler_of(plugins=bool(outside), **arguments)
