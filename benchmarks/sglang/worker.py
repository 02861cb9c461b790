"""One server: it imports, waits for its wave, starts beside that wave's others, waits for its turn, and is measured
alone.

python -m benchmarks.sglang.worker NUMBER FOLDER [--rehearse]

Starting takes most of the time (imports, compilers, graphs) and measuring little; so what can go on side by side does,
but while something is measured nothing else does.
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

from draftmark_sglang.in_process import run_until_done, scheduler_of, submit

from .arguments import environment, server_arguments
from .cases import PREFILLS, SERVERS, Server
from .imports import import_sglang
from .profiles import Profile

SKIPPED, ROUNDS, FEWER, PROFILED = 6, 40, 16, 6
"""Rounds before the clock starts; rounds measured; the same where a round is long; rounds whose kernels are listed."""


def main(number: int, folder: Path, rehearsed: bool) -> None:
    """Start, wait for the turn, measure every point, and write rows as they come."""
    server = SERVERS[number]
    os.environ.update(environment(server, rehearsed))  # before SGLang is imported, which reads it then
    if not rehearsed:
        with suppress(Exception):  # it saves time, no more: SGLang compiles what it lacks
            _compile_early(number, server)
    import_sglang(rehearsed)
    (folder / f"imported.{number}").touch()
    _wait(folder / f"go.{number}")
    from .dummies import Prompts, fill, pass_prompts_by, pools_as_asked, share_kv, share_layers

    share_layers()
    share_kv()
    pools_as_asked()
    pass_prompts_by()
    if rehearsed:
        server = _small(server)
    scheduler = scheduler_of(**server_arguments(server, folder, rehearsed))
    assert scheduler.max_total_num_tokens >= server.tokens - 64, "the pool is smaller than was asked for"
    fill(scheduler)
    # What a backend compiles when it is first asked (FlashInfer: for minutes) is there before it says that it is ready.
    run_until_done(scheduler, submit(scheduler, [list(range(2, 66))], 4 * server.case.accept))
    (folder / f"ready.{number}").touch()
    _wait(folder / f"turn.{number}")
    measured = Measured(server, scheduler, folder / f"rows.{number}.json")
    Prompts.earnest = False
    for requests, length in server.points:
        measured.decode(requests, length)
    Prompts.earnest = True
    for requests, length in PREFILLS if server.prefill and not rehearsed else ():
        measured.prefill(requests, length)
    Prompts.earnest = False
    for number_of_point in range(min(server.profiled, len(server.points))):  # last: a profiler leaves traces
        measured.profile(number_of_point)
    (folder / f"done.{number}").touch()
    os._exit(0)


class Measured:
    """What is measured of one server, written after each row."""

    def __init__(self, server: Server, scheduler: Any, file: Path) -> None:
        self._server, self._scheduler, self._file = server, scheduler, file
        self._rows: list[dict[str, Any]] = []
        self._vocabulary = scheduler.model_config.vocab_size

    def decode(self, requests: int, length: int) -> None:
        """Tokens a second from when every request has some rounds behind it."""
        case = self._server.case
        rounds = FEWER if requests * case.num_draft_tokens > 256 else ROUNDS
        marks = self._run(requests, length, rounds)
        (before, some), (after, all_) = marks[0], marks[-1]
        rate = (all_ - some) / (after - before)
        self._row(requests, length, "decode" if case.speculate == "none" else "verify", rate)
        self._rows[-1] |= _rounds([at for at, _ in marks])
        self._keep()

    def prefill(self, requests: int, length: int) -> None:
        """Tokens a second of prompts taken whole; the second time, when everything is compiled."""
        for _ in range(2):
            began = time.perf_counter()
            run_until_done(self._scheduler, submit(self._scheduler, self._prompts(requests, length), 1))
            rate = requests * length / (time.perf_counter() - began)
        self._row(requests, length, "prefill", rate)

    def profile(self, number: int) -> None:
        """What the GPU does in a round of a point that was measured, kernel by kernel."""
        with Profile() as profile:
            marks = self._run(*self._server.points[number], PROFILED, profile)
        self._rows[number]["profile"] = profile.summary(PROFILED) | _rounds([at for at, _ in marks])
        self._keep()

    def _run(self, requests: int, length: int, rounds: int, profile: Profile | None = None) -> list[tuple[float, int]]:
        """When each round from the last skipped one on had ended, and how many tokens there were then."""
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
        """Under another name first: who measures reads the file at any time."""
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps(self._rows))
        part.replace(self._file)


def _rounds(ends: list[float]) -> dict[str, float]:
    """µs of the median and of the longest round: where they lie far apart, something else ran."""
    spent = [(end - begin) * 1e6 for begin, end in pairwise(ends)]
    return dict(median_round_us=round(median(spent), 1), longest_round_us=round(max(spent), 1))


def _small(server: Server) -> Server:
    """The same server for a CPU, where SGLang's own GPU backends are not."""
    own = "torch_native" if server.case.speculate == "none" else "draftmark"
    backend = server.backend if server.backend == "draftmark" else own
    return Server(server.case, backend, ((1, 64), (3, 40)), profiled=server.profiled)


def _wait(file: Path) -> None:
    while not file.exists():
        time.sleep(0.02)


def _compile_early(number: int, server: Server) -> None:
    """SGLang compiles some things when it first needs them; servers that start together compile one each."""
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
    main(int(sys.argv[1]), Path(sys.argv[2]), "--rehearse" in sys.argv)
