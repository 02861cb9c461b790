"""One server process: imports SGLang, waits for its group to start, starts, waits for its turn, and is measured.

    python -m benchmarks.sglang.worker NUMBER FOLDER [--rehearse] [--unprofiled]

Imports, compilation and graph capture take most of the time, so the servers of a group do them at once. No other server
works during a measurement.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from draftmark_sglang_judge.in_process import run_until_done, scheduler_of, submit

from .arguments import environment, server_arguments
from .cases import PREFILLS, SERVERS, Server
from .imports import import_sglang
from .profiles import Profile

SKIPPED, ROUNDS, FEWER, PROFILED = 6, 40, 16, 6
"""Rounds: not measured at the start; measured; measured if rounds are long; recorded by the profiler."""


def main(number: int, folder: Path, rehearsed: bool, unprofiled: bool) -> None:
    """Start the server, wait for its turn, measure every point, and write each row at once."""
    server = SERVERS[number]
    os.environ.update(environment(server, rehearsed))  # SGLang reads these variables at import
    if not rehearsed:
        with suppress(Exception):  # optional: SGLang compiles missing kernels at their first use
            _compile_early(number, server)
    import_sglang(rehearsed)
    (folder / f"imported.{number}").touch()
    _wait(folder / f"go.{number}")
    from .dummies import Prompts, fill, pools_of_requested_size, share_kv, share_layers, skip_prompts

    share_layers()
    share_kv()
    pools_of_requested_size()
    skip_prompts()
    if rehearsed:
        server = _small(server)
    scheduler = scheduler_of(**server_arguments(server, folder, rehearsed))
    assert scheduler.max_total_num_tokens >= server.tokens - 64, "the pool is smaller than requested"
    fill(scheduler)
    # Compiles kernels that a backend compiles at first use (FlashInfer: for minutes), before the server is ready.
    run_until_done(scheduler, submit(scheduler, [list(range(2, 66))], 4 * server.case.accept))
    (folder / f"ready.{number}").touch()
    _wait(folder / f"turn.{number}")
    measured = Measured(server, scheduler, folder / f"rows.{number}.json")
    Prompts.computed = False
    for requests, length in server.points:
        measured.decode(requests, length)
    Prompts.computed = True
    for requests, length in PREFILLS if server.prefill and not rehearsed else ():
        measured.prefill(requests, length)
    Prompts.computed = False
    # Profiles come last, because a profiler slows down all later runs.
    for number_of_point in range(0 if unprofiled else min(server.profiled, len(server.points))):
        measured.profile(number_of_point)
    (folder / f"done.{number}").touch()
    os._exit(0)


class Measured:
    """Measurements of one server; the file is written after each row."""

    def __init__(self, server: Server, scheduler: Any, file: Path) -> None:
        self._server, self._scheduler, self._file = server, scheduler, file
        self._rows: list[dict[str, Any]] = []
        self._vocabulary = scheduler.model_config.vocab_size

    def decode(self, requests: int, length: int) -> None:
        """Measure decode tokens/s after some rounds of every request."""
        case = self._server.case
        rounds = FEWER if requests * case.num_draft_tokens > 256 else ROUNDS
        marks = self._run(requests, length, rounds)
        (before, some), (after, all_) = marks[0], marks[-1]
        rate = (all_ - some) / (after - before)
        self._row(requests, length, "decode" if case.speculate == "none" else "verify", rate)
        self._rows[-1] |= _rounds([at for at, _ in marks])
        self._keep()

    def prefill(self, requests: int, length: int) -> None:
        """Measure prefill tokens/s in the second run, when all kernels are compiled."""
        for _ in range(2):
            began = time.perf_counter()
            run_until_done(self._scheduler, submit(self._scheduler, self._prompts(requests, length), 1))
            rate = requests * length / (time.perf_counter() - began)
        self._row(requests, length, "prefill", rate)

    def profile(self, number: int) -> None:
        """Profile the GPU kernels of decoding rounds at point `number`, and add them to its row."""
        with Profile() as profile:
            marks = self._run(*self._server.points[number], PROFILED, profile)
        self._rows[number]["profile"] = profile.summary(PROFILED) | _rounds([at for at, _ in marks])
        self._keep()

    def _run(self, requests: int, length: int, rounds: int, profile: Profile | None = None) -> list[tuple[float, int]]:
        """Return the end time of each measured round, and the number of tokens at that time."""
        accept = self._server.case.accept
        wanted = [1 + (SKIPPED + one) * accept for one in range(rounds + 1)]
        running = submit(self._scheduler, self._prompts(requests, length), wanted[-1] + 2 * accept)
        marks: list[tuple[float, int]] = []

        def watch() -> None:
            counts = [len(request.output_ids) for request in running]
            while len(marks) <= rounds and min(counts) >= wanted[len(marks)]:
                if profile is not None and len(marks) in (0, rounds):
                    profile.start() if not marks else profile.stop()
                marks.append((time.perf_counter(), sum(counts)))

        run_until_done(self._scheduler, running, watch)
        return marks

    def _prompts(self, requests: int, length: int) -> list[list[int]]:
        make = random.Random(length * 100 + requests)
        return [[make.randrange(2, self._vocabulary) for _ in range(length)] for _ in range(requests)]

    def _row(self, requests: int, length: int, phase: str, rate: float) -> None:
        case = self._server.case
        row = dict(case=f"{case.name} {requests}x{length}", phase=phase, backend=self._server.backend)
        row |= dict(page_size=case.page_size, num_gpus=1, tokens_per_s=round(rate, 1), speculate=case.speculate)
        self._rows.append(row | dict(num_reqs=requests, prompt_len=length, accept_len=case.accept))
        self._keep()

    def _keep(self) -> None:
        """Write the rows to another name and rename the file, because the parent process reads it at any time."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._rows))
        part.replace(self._file)


def _rounds(ends: list[float]) -> dict[str, float]:
    """Return µs of the median and of the longest round. A large difference means that something else ran."""
    spent = [(end - begin) * 1e6 for begin, end in pairwise(ends)]
    return dict(median_round_us=round(median(spent), 1), longest_round_us=round(max(spent), 1))


def _small(server: Server) -> Server:
    """Return the server with backends and points for a CPU, where SGLang's GPU backends do not run."""
    own = "torch_native" if server.case.speculate == "none" else "draftmark"
    backend = server.backend if server.backend == "draftmark" else own
    return Server(server.case, backend, ((1, 64), (3, 40)), profiled=server.profiled)


def _wait(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def _compile_early(number: int, server: Server) -> None:
    """Compile one of the kernels that SGLang compiles at first use; servers that start together share them on disk."""
    if server.case.speculate == "ngram":
        from sglang.kernels.ops.speculative.ngram_corpus import get_ngram_corpus_cls

        get_ngram_corpus_cls()
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
    main(int(sys.argv[1]), Path(sys.argv[2]), "--rehearse" in sys.argv, "--unprofiled" in sys.argv)
