"""Faster start of many engines: shared imports, and one compilation of each Triton kernel for all processes.

Two costs grow with the number of engines that start at the same time. vLLM starts a new Python process to inspect the
class of a model, and that process imports everything anew: about 20 s, 40 s with a draft head (vLLM 0.26, 15 engines).
Each process compiles the same Triton kernels while it captures graphs: 15 to 49 s.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

MODULES = (
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.gpu_worker",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.v1.worker.gpu.model_runner",
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.triton_attn",
    "vllm.compilation.backends",
    "vllm.compilation.piecewise_backend",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch._inductor.standalone_compile",
    "torch._inductor.codegen.triton",
    "draftmark_vllm.trees.worker",
)
"""Modules that engines import during their start. A module that cannot be imported is skipped."""
DEVICE_FILE = "/dev/nvidia-uvm"
"""Device file that a process holds open once it has initialized an NVIDIA device. Its forks cannot use the device."""


def prepare(architectures: Iterable[str]) -> None:
    """Import the modules that every engine's process needs, and register the model classes.

    vLLM inspects a model class in a new process, in each of its own processes, so that these do not initialize the
    device. A class that is registered as an object is inspected without a new process.
    """
    for name in MODULES:
        _try(lambda name=name: importlib.import_module(name))  # type: ignore[misc]
    _try(_load_plugins)
    for one in architectures:
        _try(lambda one=one: _register(one))  # type: ignore[misc]


def _load_plugins() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()


def _register(architecture: str) -> None:
    from vllm import ModelRegistry

    ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _try(what: Callable[[], Any]) -> None:
    try:
        what()
    except Exception as error:  # not raised, because preparation only saves time
        print(f"not prepared: {type(error).__name__}: {str(error)[:160]}", flush=True)


def touched_device() -> bool:
    """Return whether this process has opened an NVIDIA device, so that its forks cannot use the device."""
    try:
        held = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    except OSError:
        return False
    return DEVICE_FILE in held


def share_kernels(folder: Path) -> None:
    """Keep Triton's kernels of all engines in one folder, and let one process compile each while the others wait."""
    folder.mkdir(parents=True, exist_ok=True)
    # If unset, Inductor sets this variable for the whole process, to a folder that other engines do not share.
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        import triton
        import triton.compiler
    except ImportError:
        return
    found = once(triton.compiler.compile, folder / "locks")
    triton.compiler.compile = triton.compile = found


def once(compile_kernel: Callable[..., Any], locks: Path) -> Callable[..., Any]:
    """Wrap Triton's `compile` so that one process at a time compiles a kernel; the next finds the kernel on disk."""
    locks.mkdir(parents=True, exist_ok=True)

    def compile_once(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if not hasattr(src, "hash"):
            return compile_kernel(src, target=target, options=options, **more)
        about = f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}"
        with (locks / hashlib.sha256(about.encode()).hexdigest()).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            return compile_kernel(src, target=target, options=options, **more)

    return compile_once
