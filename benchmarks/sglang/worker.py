"""One server of one case: started beside the others, measured alone.

python -m benchmarks.sglang.worker NUMBER FOLDER

Starting takes most of the time (imports, compilers), and measuring little. So all servers start at once, say so in
FOLDER, and each is measured when FOLDER has its turn, while the others wait.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from .cases import MEASURED, POINTS, VOCABULARY, environment, server_arguments
from .in_process import run_until_done, scheduler_of, submit

NEW_TOKENS, WARM_UP, SKIPPED = 160, 24, 16


def main(number: int, folder: Path) -> None:
    """Start, wait for the turn, measure every point, and write rows as they come."""
    case, backend = MEASURED[number]
    os.environ.update(environment(case))  # before SGLang is imported, which reads it then
    _compile_early(number)
    scheduler = scheduler_of(**server_arguments(case, backend, folder))
    (folder / f"ready.{number}").touch()
    while not (folder / f"turn.{number}").exists():
        time.sleep(0.05)
    rows = []
    for requests, prompt in POINTS:
        _tokens_per_s(scheduler, requests, prompt, WARM_UP)
        rate, prefill, texts = _tokens_per_s(scheduler, requests, prompt, NEW_TOKENS)
        common = dict(case=f"{case.name} {requests}x{prompt}", backend=backend, page_size=case.page_size, num_gpus=1)
        common |= dict(speculate=case.speculate, num_reqs=requests, prompt_len=prompt, accept_len=case.accept)
        rows.append(common | dict(phase="decode", tokens_per_s=round(rate, 1)))
        rows.append(common | dict(phase="prefill", tokens_per_s=round(prefill, 1)))
        if case.speculate == "none" and requests == 1:
            rows[-2]["text"] = texts[0][:64]
        (folder / f"rows.{number}.json").write_text(json.dumps(rows))
    (folder / f"done.{number}").touch()


def _tokens_per_s(scheduler: Any, requests: int, prompt: int, new_tokens: int) -> tuple[float, float, list[list[int]]]:
    """Tokens a second of decoding, from when every request has some tokens on; of prefilling; and the texts."""
    make = random.Random(prompt * 100 + requests)
    prompts = [[make.randrange(2, VOCABULARY) for _ in range(prompt)] for _ in range(requests)]
    started = time.perf_counter()
    running = submit(scheduler, prompts, new_tokens, f"{requests}x{prompt}-{new_tokens}")
    marks: list[
        tuple[float, int]
    ] = []  # when every request had one token, some tokens, all tokens; and how many in all
    wanted = (1, min(SKIPPED, new_tokens - 1), new_tokens)

    def watch() -> None:
        counts = [min(len(request.output_ids), new_tokens) for request in running]
        while len(marks) < len(wanted) and min(counts) >= wanted[len(marks)]:
            marks.append((time.perf_counter(), sum(counts)))

    run_until_done(scheduler, running, watch)
    (first, _), (some, before), (ended, total) = marks
    texts = [list(request.output_ids) for request in running]
    return (total - before) / max(ended - some, 1e-9), requests * prompt / (first - started), texts


def _compile_early(number: int) -> None:
    """SGLang compiles three kernels when it first needs them; servers that start together compile one each."""
    import torch
    from sglang.kernels.ops.activation.activation import activation_module
    from sglang.kernels.ops.attention.rope import _jit_fused_rope_module
    from sglang.kernels.ops.kvcache.kvcache import _jit_kvcache_module

    kernels = (
        lambda: _jit_fused_rope_module(True, 128, torch.bfloat16, torch.bfloat16),
        lambda: activation_module(torch.bfloat16),
        lambda: _jit_kvcache_module(2048, 2048),
    )
    kernels[number % len(kernels)]()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
