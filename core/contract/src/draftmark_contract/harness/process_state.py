"""Reads the state of this process that all its code shares: settings, generators, handlers, variables, functions.

Imports only torch and the standard library, because the process of a black box loads this file without the suite.
"""

from __future__ import annotations

import builtins
import decimal
import faulthandler
import gc
import itertools
import locale
import logging
import os
import random
import signal
import socket
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch

try:
    import resource
except ImportError:  # Windows has no such limits.
    resource = None  # type: ignore[assignment]

State = dict[str, Any]
"""Value by name. Values are compared with ==."""

PLAIN = (bool, int, str, float, tuple, torch.dtype, torch.device, types.NoneType)
READERS = ("_get_", "_is_", "get_", "is_", "are_")
CHANGING = ("autocast_", "thread_name", "exception_msg", "exception_class", "current_graph", "version", "max_operator")
"""Parts of names of torch's readers that are deprecated, or have values that no setting decides."""
_TINY = 2.0**-60
"""A number that a sum with 1 loses, unless the processor rounds away from the nearest number."""
COUNTERS = ("allocatedblocks", "refcount", "getframe", "profile", "trace", "unicodeinternedsize")
PATCHED = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.cuda,
    torch.random,
    torch.ops.aten,
    builtins,
    os,
    time,
    random,
)
"""Namespaces with functions that no plugin may replace."""


def process_state(modules: bool = True) -> State:
    """Return the state of this process and thread.

    Args:
        modules: include what an import may change too: filters of warnings, import paths, loggers and threads.
    """
    found = {**_of_torch(), **_of_python(), **_of_the_system(), **_functions()}
    return {**found, **_of_imports()} if modules else found


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the names with different values, and the values before and after. Names of one side only are left out."""
    found: dict[str, tuple[Any, Any]] = {}
    for name, was in before.items():
        now = after.get(name, was)
        if was is now or was == now:
            continue
        if isinstance(was, _Functions):
            found |= {f"{name}: {one}": (was[one], now[one]) for one in was.replaced(now)}
        else:
            found[name] = was, now
    return found


@cache
def _torch_readers() -> dict[str, Callable[[], Any]]:
    """Return torch's functions without arguments that read a setting, by name."""
    found: dict[str, Callable[[], Any]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for owner in (torch, torch._C):
            for name in dir(owner):
                if name.startswith(READERS) and not any(part in name for part in CHANGING):
                    value = _value(getattr(owner, name))
                    if value is not _MISSING:
                        found[f"torch.{name.lstrip('_')}()"] = getattr(owner, name)
    for kind, op in itertools.product(("generic", "cuda", "mkldnn"), ("all", "matmul", "conv", "rnn")):
        reader = _precision(kind, op)
        if _value(reader) is not _MISSING:
            found[f"torch.backends.{kind}.{op}.fp32_precision"] = reader
    for name, module in sorted(sys.modules.items()):
        if name.startswith("torch.backends."):
            for field in dir(type(module)):
                reader = _attribute(module, field)
                if not field.startswith("_") and _value(reader) is not _MISSING:
                    found[f"{name}.{field}"] = reader
    return found


_MISSING = object()


def _value(reader: Callable[[], Any]) -> Any:
    try:
        value = reader()
    except (Exception, SystemExit):
        return _MISSING
    return value if isinstance(value, PLAIN) else _MISSING


def _precision(owner: str, op: str) -> Callable[[], Any]:
    return lambda: torch._C._get_fp32_precision_getter(owner, op)


def _attribute(module: object, field: str) -> Callable[[], Any]:
    return lambda: getattr(module, field)


def _of_torch() -> State:
    found: State = {name: _value(reader) for name, reader in _torch_readers().items()}
    found["torch's generator"] = torch.get_rng_state().numpy().tobytes()
    found["flushing of denormal numbers"] = bool((torch.full((1,), 1e-40) * 1 == 0).item())
    found["torch's function modes"] = torch._C._len_torch_function_stack()
    found["torch's dispatch modes"] = torch._C._len_torch_dispatch_stack()
    found["torch's print options"] = repr(vars(torch._tensor_str.PRINT_OPTS))
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["the device's generator"] = torch.cuda.get_rng_state().numpy().tobytes()
        found["the current device"] = torch.cuda.current_device()
        found["the current stream"] = torch.cuda.current_stream().stream_id
    return found


def _of_python() -> State:
    found: State = {
        f"sys.{name}()": value
        for name in dir(sys)
        if name.startswith("get") and not any(part in name for part in COUNTERS)
        if (value := _value(getattr(sys, name))) is not _MISSING
    }
    hooks = ("excepthook", "displayhook", "unraisablehook", "breakpointhook", "stdin", "stderr")
    found |= {f"sys.{name}": getattr(sys, name) for name in hooks}
    found |= {
        "sys.profile": sys.getprofile(),
        "sys.trace": sys.gettrace(),
        "threading.excepthook": threading.excepthook,
    }
    found["random's generator"] = random.getstate()
    found["the decimal context"] = repr(decimal.getcontext())
    # The number of frozen objects falls when one of them is freed.
    is_frozen = gc.get_freeze_count() > 0
    found["gc"] = gc.isenabled(), gc.get_threshold(), gc.get_debug(), is_frozen, len(gc.callbacks)
    found["socket.getdefaulttimeout()"] = socket.getdefaulttimeout()
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        state = numpy.random.get_state(legacy=False)
        found["numpy's generator"] = repr(state["state"]["pos"]), state["state"]["key"].tobytes()
        found["numpy's error state"] = repr(numpy.geterr()), repr(numpy.get_printoptions())
    return found


def _of_the_system() -> State:
    handled = signal.valid_signals()
    found: State = {f"the handler of signal {int(one)}": signal.getsignal(one) for one in handled}
    found["os.environ"] = dict(os.environ)
    found["the current folder"] = os.getcwd()
    found["the locale"] = locale.setlocale(locale.LC_ALL)
    found["the time zone"] = time.tzname
    found["faulthandler"] = faulthandler.is_enabled()
    if hasattr(os, "sched_getaffinity"):
        found["the processor affinity"] = os.sched_getaffinity(0)
    if hasattr(os, "getpriority"):
        found["the priority"] = os.getpriority(os.PRIO_PROCESS, 0)
    if resource is not None:
        names = (name for name in dir(resource) if name.startswith("RLIMIT_"))
        found |= {f"the limit {name}": resource.getrlimit(getattr(resource, name)) for name in names}
    found["the rounding of float64"] = 1.0 + _TINY, -1.0 - _TINY, 1.0 - _TINY
    if hasattr(signal, "pthread_sigmask"):
        found["blocked signals"] = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    mask = os.umask(0)
    os.umask(mask)
    found["the file mode mask"] = mask
    return found


def _of_imports() -> State:
    found: State = {"warnings.filters": list(warnings.filters), "warnings.showwarning": warnings.showwarning}
    found["sys.path"], found["sys.meta_path"] = list(sys.path), list(sys.meta_path)
    found["the root logger"] = logging.root.level, list(logging.root.handlers), logging.root.manager.disable
    found["threads"] = sorted(one.name for one in threading.enumerate())
    return found


class _Functions(dict[str, Any]):
    """Functions of one namespace by name. Two are equal when none of the names of both was replaced."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Functions) and not self.replaced(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def replaced(self, other: _Functions) -> list[str]:
        """Return the names of both namespaces that have different functions."""
        return [name for name, value in self.items() if callable(value) and other.get(name, value) is not value]


def _functions() -> State:
    """Return the functions of `PATCHED`, by namespace. Names that an import adds do not count."""
    return {f"functions of {getattr(owner, '__name__', owner)}": _Functions(vars(owner)) for owner in PATCHED}
