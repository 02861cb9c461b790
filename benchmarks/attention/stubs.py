"""Imports kernels of SGLang, vLLM and xformers from an unpacked folder, without the engines around them.

`DRAFTMARK_PEERS` is a folder with files of their wheels. They are not part of this repository:

    pip download --no-deps sglang==0.5.23 vllm==0.33.0 xformers==0.0.35
    unzip 'sglang-*.whl' 'sglang/kernels/ops/attention/*.py' 'sglang-*/METADATA' -d peers
    unzip 'vllm-*.whl' 'vllm/v1/attention/ops/triton_*attention*.py' 'vllm-*/METADATA' -d peers
    unzip 'xformers-*.whl' -d peers

The engines' kernel files are plain Python and Triton. This module replaces their imports from the engine (flags, device
queries, a logger, an enumeration), with the values of an NVIDIA GPU and default settings.
"""

from __future__ import annotations

import enum
import functools
import importlib
import importlib.metadata as md
import importlib.util
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

PEERS = "DRAFTMARK_PEERS"


class Absent(Exception):
    """Raised if a peer (another library's kernel) cannot run here, or cannot compute a case."""


def folder(package: str) -> Path:
    """Return the unpacked folder of one package."""
    root = Path(os.environ.get(PEERS) or "/nonexistent") / package
    if not root.is_dir():
        raise Absent(f"{PEERS} names no folder with {package}'s files")
    return root


def versions() -> dict[str, str]:
    """Return the name and version of each distribution in the folder."""
    root = os.environ.get(PEERS)
    return {d.name: d.version for d in md.distributions(path=[root])} if root else {}


@functools.cache
def sglang() -> SimpleNamespace:
    """Import SGLang's Triton attention: decode, extend (prefill and verify), and its number of splits."""
    root = folder("sglang")
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        _package(name, root.joinpath(*name.split(".")[1:]))
    no, yes = (lambda *_: False), (lambda *_: True)
    _module("sglang.srt")
    _module("sglang.srt.environ", envs=_Flags())
    _module(
        "sglang.srt.utils", is_hip=no, is_cuda=yes, is_gfx95_supported=no, is_gfx1250_supported=no,
        get_device_core_count=lambda i=0: torch.cuda.get_device_properties(i).multi_processor_count,
    )  # fmt: skip
    load = functools.partial(_load, "sglang.kernels.ops.attention")
    return SimpleNamespace(
        decode=load("decode_attention").decode_attention_fwd,
        extend=load("extend_attention").extend_attention_fwd,
        splits=load("metadata").get_num_kv_splits_triton,
    )


@functools.cache
def vllm() -> SimpleNamespace:
    """Import vLLM's unified Triton attention."""
    root = folder("vllm")
    for name in ("vllm", "vllm.v1", "vllm.v1.attention", "vllm.v1.attention.ops"):
        _package(name, root.joinpath(*name.split(".")[1:]))
    import triton
    import triton.language as tl

    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn,
        is_device_capability_family=lambda family: torch.cuda.get_device_capability()[0] * 10 == family,
    )
    _module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    _module("vllm.logger", init_logger=_logger)
    _module("vllm.platforms", current_platform=platform)
    _module("vllm.triton_utils", tl=tl, triton=triton)
    _module("vllm.v1.kv_cache_interface", KVQuantMode=_KVQuantMode)
    return SimpleNamespace(attention=_load("vllm.v1.attention.ops", "triton_unified_attention").unified_attention)


@functools.cache
def xformers() -> SimpleNamespace:
    """Import the parts of xformers that its `ops.tree_attention` uses."""
    root = folder("xformers")
    if str(root.parent) not in sys.path:
        sys.path.append(str(root.parent))
    try:
        fmha = importlib.import_module("xformers.ops.fmha")
    except Exception as error:
        raise Absent(f"xformers cannot be imported: {type(error).__name__}: {error}") from None
    # The wheel is built for one CUDA and one torch version. If its C++ part does not load, it also disables its Triton
    # kernels, which do not need that part.
    importlib.import_module("xformers.ops.fmha.common")._built_with_cuda = True
    return SimpleNamespace(fmha=fmha, bias=fmha.attn_bias, splitk=fmha.triton_splitk.FwOp)


class _KVQuantMode(enum.IntEnum):
    NONE = 0
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 5


class _Flags:
    """Environment flags of an engine, all of them off."""

    def __getattr__(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(get=lambda: False)


def _logger(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    for level in ("debug", "info", "warning"):
        setattr(logger, f"{level}_once", getattr(logger, level))
    return logger


def _module(name: str, **members: object) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)
    return module


def _package(name: str, path: Path) -> None:
    """Register a package of the folder without its `__init__.py`, which would import the engine."""
    _module(name).__path__ = [str(path)]


def _load(package: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(f"{package}.{name}")
    except Exception as error:
        raise Absent(f"{package}.{name} cannot be imported: {type(error).__name__}: {error}") from None
