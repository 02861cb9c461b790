"""Counts Triton's compilations in every process of a server, without a change of the engine.

The modules that `UNUSED` names become empty if their import fails: SGLang's EAGLE workers import backends of attention
that no server of the benchmark uses, and that need libraries which a machine may lack.

Python imports this module at the start of each process with this folder in PYTHONPATH. When the process imports
Triton, the module sets Triton's own listener of compilations. Each compilation, and each kernel loaded from Triton's
cache, becomes a line of JSON in the file that `FILE` names. Processes append to one file, so a line is one write.
In the same way vLLM's builders of attention metadata get a timer. It writes to the file that `BUILDS` names.
SGLang's scheduler gets a timer of its steps, which writes to the file that `STEPS` names.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections import deque
from functools import wraps
from time import perf_counter, time

FILE = "DRAFTMARK_COMPILATIONS"
BUILDS = "DRAFTMARK_BUILD_TIMES"
STEPS = "DRAFTMARK_STEP_TIMES"
UNUSED = "DRAFTMARK_UNUSED_MODULES"
KNOBS = "triton.knobs"
BUILDERS = {
    "vllm.v1.attention.backends.flash_attn": "FlashAttentionMetadataBuilder",
    "vllm.v1.attention.backends.mla.flashattn_mla": "FlashAttnMLAMetadataBuilder",
    "draftmark_vllm.builder": "DraftmarkBuilder",
    "draftmark_vllm.latent.builder": "DraftmarkMLABuilder",
}
"""vLLM's builders of attention metadata that are timed, by their modules."""
SCHEDULER = "sglang.srt.managers.scheduler"
PROMPT_ROWS = 64
"""A step has a prompt if a request has at least this number of rows. Verified drafts are fewer."""
FLUSHED = 32
"""Number of builds in one line of the file."""


def heard(src, metadata, metadata_group, times, cache_hit):
    """Append a line about one compiled or loaded kernel; arguments are those of Triton's listener."""
    with contextlib.suppress(Exception):  # a line that cannot be written must not end a server
        function = getattr(src, "fn", None)
        line = {
            "kernel": getattr(function, "__name__", None) or metadata.get("name", "unknown"),
            "module": getattr(function, "__module__", None) or "",
            "loaded": cache_hit,
            "at": round(time(), 3),
            "ms": round(times.total / 1000, 1),
        }
        append(os.environ[FILE], line)


def append(path, line):
    """Append a line of JSON to a file, in one write."""
    to = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(to, (json.dumps(line) + "\n").encode())
    finally:
        os.close(to)


def timed(build):
    """Return a builder's `build` that also notes its microseconds and whether the step has prompts and decodes."""
    found = []

    @wraps(build)
    def build_and_note(self, common_prefix_len, common_attn_metadata, *rest, **more):
        began = perf_counter()
        made = build(self, common_prefix_len, common_attn_metadata, *rest, **more)
        us = round(1e6 * (perf_counter() - began), 1)
        has_prompt, reqs = common_attn_metadata.max_query_len >= PROMPT_ROWS, common_attn_metadata.num_reqs
        found.append(["decode" if not has_prompt else "mixed" if reqs > 1 else "prompt", us])
        if len(found) == FLUSHED:
            with contextlib.suppress(OSError):
                append(os.environ[BUILDS], found)
            found.clear()
        return made

    return build_and_note


def time_steps(module):
    """Write a line for each step of SGLang's scheduler: its mode, requests and rows, and when it began and ended.

    A step begins when the scheduler launches it, and ends when the scheduler has processed its result.
    """
    scheduler, launched = module.Scheduler, deque()
    run, process = scheduler.run_batch, scheduler.process_batch_result

    @wraps(run)
    def run_and_note(self, batch, *rest, **more):
        rows = getattr(batch, "extend_num_tokens", None) if batch.forward_mode.is_extend() else None
        reqs = len(batch.reqs)
        launched.append({"mode": batch.forward_mode.name, "reqs": reqs, "rows": rows or reqs, "began": time()})
        made = run(self, batch, *rest, **more)
        launched[-1]["host_ms"] = round(1000 * (time() - launched[-1]["began"]), 2)
        return made

    @wraps(process)
    def process_and_note(self, *rest, **more):
        made = process(self, *rest, **more)
        with contextlib.suppress(IndexError, OSError):
            append(os.environ[STEPS], launched.popleft() | {"ended": time()})
        return made

    scheduler.run_batch, scheduler.process_batch_result = run_and_note, process_and_note


def listen(module):
    """Set Triton's listener; a Triton without it is not counted."""
    module.compilation.listener = heard


def time_builds(module):
    """Time the builds of a module's builder."""
    builder = getattr(module, BUILDERS[module.__name__])
    builder.build = timed(builder.build)


class After:
    """Finds each of these modules once, with a loader that calls a function on the module after it has run."""

    def __init__(self, functions):
        self.functions = functions

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a listed module, and None for any other module."""
        function = self.functions.pop(name, None)
        if function is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_call(module):
            run(module)
            with contextlib.suppress(Exception):  # an engine that lacks the hook's place is not measured
                function(module)

        spec.loader.exec_module = run_and_call
        return spec


class StandIns:
    """Finds each of these modules once, with a loader that keeps the module if its code raises an error."""

    def __init__(self, names):
        self.names = set(names)

    def find_spec(self, name, path=None, target=None):
        """Return the spec of a listed module, and None for any other module."""
        if name not in self.names:
            return None
        self.names.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_or_stand_in(module):
            try:
                run(module)
            except Exception:  # a module with a missing library can raise any error
                module.__getattr__ = empty_class

        spec.loader.exec_module = run_or_stand_in
        return spec


def empty_class(name):
    """Return an empty class for any name. Names such as `__file__` raise AttributeError, as Python expects."""
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


def run_hidden():
    """Run the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [one for one in sys.path if os.path.abspath(one) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(FILE):
    timers = dict.fromkeys(BUILDERS if os.environ.get(BUILDS) else (), time_builds)
    timers |= {SCHEDULER: time_steps} if os.environ.get(STEPS) else {}
    sys.meta_path.insert(0, After({KNOBS: listen} | timers))
    sys.meta_path.insert(0, StandIns(filter(None, os.environ.get(UNUSED, "").split(","))))
    run_hidden()
