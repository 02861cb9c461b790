"""Counts Triton's compilations in every process of a server, without a change of the engine.

Python imports this module at the start of each process with this folder in PYTHONPATH. When the process imports
Triton, the module sets Triton's own listener of compilations. Each compilation, and each kernel loaded from Triton's
cache, becomes a line of JSON in the file that `FILE` names. Processes append to one file, so a line is one write.
"""

import contextlib
import importlib.machinery
import importlib.util
import json
import os
import sys

FILE = "DRAFTMARK_COMPILATIONS"
KNOBS = "triton.knobs"


def heard(src, metadata, metadata_group, times, cache_hit):
    """Append a line about one compiled or loaded kernel; arguments are those of Triton's listener."""
    with contextlib.suppress(Exception):  # a line that cannot be written must not end a server
        function = getattr(src, "fn", None)
        line = {
            "kernel": getattr(function, "__name__", None) or metadata.get("name", "unknown"),
            "module": getattr(function, "__module__", None) or "",
            "loaded": cache_hit,
            "ms": round(times.total / 1000, 1),
        }
        to = os.open(os.environ[FILE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(to, (json.dumps(line) + "\n").encode())
        finally:
            os.close(to)


class Finder:
    """Finds `KNOBS` once, with a loader that sets the listener after the module has run."""

    def find_spec(self, name, path=None, target=None):
        """Return the spec of `KNOBS`, and None for any other module."""
        if name != KNOBS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_listen(module):
            run(module)
            with contextlib.suppress(Exception):  # a Triton without this listener is not counted
                module.compilation.listener = heard

        spec.loader.exec_module = run_and_listen
        return spec


def run_hidden():
    """Run the `sitecustomize` that this one hides, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    others = [one for one in sys.path if os.path.abspath(one) != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if os.environ.get(FILE):
    sys.meta_path.insert(0, Finder())
    run_hidden()
