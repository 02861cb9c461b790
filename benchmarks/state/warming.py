"""Compiles the kernels of cases in parallel processes, and shortens the autotuning of other libraries."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from .cases import Case, cases
from .peers import peers

REQUESTS = 16
"""Requests of the small cases: a multiple of 16 like those of the measured cases, so that Triton compiles the same."""
PROMPTS = ("extend-1x512", "extend-8x512")
OURS, PARTS = "draftmark", 3
"""Our backend, and processes among which the configurations of another library are divided."""
TUNING_MS = 20
"""Milliseconds for which an autotuner times one configuration, instead of 100."""


def warm(wanted: list[Case], requests: int, names: list[str] | None) -> None:
    """Run small cases in separate processes.

    Args:
        wanted: the cases that will be measured, of the list for this number of requests.
        requests: requests of decode and verify cases.
        names: the backends; None for every backend.
    """
    small = [one for one, whole in zip(cases(REQUESTS), cases(requests), strict=True) if whole in wanted]
    command = [sys.executable, "-m", "benchmarks.state", "--turns", "0", "--requests", str(REQUESTS)]
    backends, running = names or [OURS, *peers(wanted[0])], []
    for layer in dict.fromkeys(one.layer.name for one in small):
        own = [one for one in small if one.layer.name == layer]
        chosen = [*command, "--layer", layer]
        if any(one.mode == "extend" for one in own):
            for backend in backends:
                prompts = [*chosen, "--backend", backend, "--case", *PROMPTS]
                parts = 1 if backend == OURS else PARTS
                running += [[*prompts, "--tuning-part", f"{part}/{parts}"] for part in range(parts)]
        others = [one.name for one in own if one.mode != "extend"]
        if others:
            running.append([*chosen, "--backend", *backends, "--case", *others])
    for one in [subprocess.Popen(command) for command in running]:
        one.wait()


def shorten_tuning(part: str) -> None:
    """Let each autotuner of this process time a configuration for TUNING_MS only.

    Args:
        part: "i/n" keeps only each n-th configuration from the i-th on.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    first, count = map(int, part.split("/"))
    make: Callable[..., None] = Autotuner.__init__
    bench = partial(do_bench, warmup=TUNING_MS // 4, rep=TUNING_MS)

    def shortened(self: Any, fn: Any, arg_names: Any, configs: Any, *args: Any, **named: Any) -> None:
        own = (configs or [])[first::count] or configs
        make(self, fn, arg_names, own, *args, **named)
        self._do_bench = self._do_bench or bench

    Autotuner.__init__ = shortened
