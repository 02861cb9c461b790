"""Counts Triton's compilations in every process of a server, without a change of the engine.

The modules that `UNUSED` names become empty if their import fails: SGLang's EAGLE workers import backends of attention
that no server of the benchmark uses, and that need libraries which a machine may lack.

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
UNUSED = "DRAFTMARK_UNUSED_MODULES"
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
    sys.meta_path.insert(0, Finder())
    sys.meta_path.insert(0, StandIns(filter(None, os.environ.get(UNUSED, "").split(","))))
    run_hidden()
