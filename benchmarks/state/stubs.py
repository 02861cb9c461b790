"""Imports kernel files of vLLM and SGLang from an unpacked folder, without the engines around them.

`DRAFTMARK_PEERS` is a folder with files of their wheels and of fla-core; `carry.py` makes it. A module of an engine
that the folder lacks is a stand-in: every name in it is an object that is false and returns itself when called. `KNOWN`
has the names that kernels need, with their values on an NVIDIA GPU with default settings.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

PEERS = "DRAFTMARK_PEERS"
ENGINES = ("vllm", "sglang")


class Absent(Exception):
    """Raised if a library cannot run here, or cannot compute a case."""


class Missing:
    """Stands for a name of an engine that no kernel uses: false, callable, subscriptable, usable as a base class."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __bool__(self) -> bool:
        return False

    def __call__(self, *args: Any, **_: Any) -> Any:
        """Return a decorated function unchanged, and otherwise this object."""
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Missing:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, _: Any) -> type[Missing]:
        return cls

    def __mro_entries__(self, _: Any) -> tuple[type, ...]:
        return (object,)

    def __getitem__(self, _: Any) -> Missing:
        return self


def _capability() -> int:
    return int("".join(map(str, torch.cuda.get_device_capability()))) if torch.cuda.is_available() else 90


class _Platform(Missing):
    """vLLM's platform object for an NVIDIA GPU."""

    def is_cuda(self) -> bool:
        return True

    def is_cuda_alike(self) -> bool:
        return True

    def has_device_capability(self, wanted: Any, *_: Any) -> bool:
        return _capability() >= (wanted if isinstance(wanted, int) else wanted[0] * 10 + wanted[1])

    def is_device_capability_family(self, wanted: int, **_: Any) -> bool:
        return _capability() // 10 == wanted // 10


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", functools.partial(_log, getattr(logger, level)))
    return logger


def _log(write: Any, text: str, *values: Any, **_: Any) -> None:
    write(text, *values)


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _yes(*_: Any, **__: Any) -> bool:
    return True


def _cores(*_: Any) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def _device_file_name() -> str:
    return torch.cuda.get_device_name().replace(" ", "_")


def _libdevice() -> Any:
    from triton.language.extra import libdevice

    return libdevice


KNOWN: dict[str, dict[str, Any]] = {
    "vllm.triton_utils": {"triton": triton, "tl": tl, "tldevice": _libdevice(), "HAS_TRITON": True},
    "vllm.platforms": {"current_platform": _Platform()},
    "vllm.utils.math_utils": {
        "cdiv": _cdiv, "next_power_of_2": triton.next_power_of_2, "RCP_LN2": 1.4426950408889634,
    },
    "vllm.utils.platform_utils": {"num_compute_units": _cores, "get_device_name_as_file_name": _device_file_name},
    "vllm.envs": {"VLLM_TUNED_CONFIG_FOLDER": None},
    "vllm.utils.gpu_sync_debug": {"gpu_sync_allowed": contextlib.nullcontext},
    "vllm.utils.torch_utils": {"async_tensor_h2d": torch.as_tensor},
    "vllm.logger": {"init_logger": _logger},
    "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
    "sglang.srt.utils": {
        "is_cuda": _yes, "is_sm90_supported": lambda *_: _capability() == 90, "get_device_sm": _capability,
        "get_bool_env_var": lambda name, default="false": os.getenv(name, default).lower() in ("true", "1"),
    },
    "sglang.srt.utils.common": {
        "torch_release": tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2]),
        "get_device_core_count": _cores,
    },
    "sglang.kernels.jit.utils": {"is_arch_support_pdl": lambda *_: _capability() >= 90},
}  # fmt: skip


class _StandIn(ModuleType):
    """A module in which every unknown name is `Missing`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Missing()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of the engines: their kernel files, and stand-ins for everything else.

    A package is a folder only: its `__init__.py` would import the engine.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a kernel file, or of a folder or stand-in."""
        if name.partition(".")[0] not in ENGINES:
            return None
        where = self.root.joinpath(*name.split("."))
        if where.with_suffix(".py").is_file() and name not in KNOWN:
            return importlib.util.spec_from_file_location(name, where.with_suffix(".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """Return the stand-in of a package or of an absent module."""
        module = _StandIn(spec.name)
        vars(module).update(KNOWN.get(spec.name, {}))
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` has made all names."""


@functools.cache
def _root() -> Path:
    root = Path(os.environ.get(PEERS) or "/nonexistent")
    if not root.is_dir():
        raise Absent(f"{PEERS} is not set to a folder with the libraries' files; make one with benchmarks.state.carry")
    sys.meta_path.insert(0, _Finder(root))
    sys.path.append(str(root))
    return root


def kernels(name: str) -> Any:
    """Import one module of a library from the folder.

    Raises:
        Absent: the folder lacks it, or it cannot be imported.
    """
    root = _root()
    if name.partition(".")[0] in ENGINES and not root.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise Absent(f"{PEERS} has no file of {name}")
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise Absent(f"{name} cannot be imported: {type(error).__name__}: {error}") from error


def versions() -> dict[str, str]:
    """Return name and version of each distribution in the folder."""
    root = os.environ.get(PEERS)
    return {one.name: one.version for one in importlib.metadata.distributions(path=[root])} if root else {}
