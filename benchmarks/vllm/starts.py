"""What an engine's start is spared: the parent imports for all, and of many processes one compiles a kernel.

Of vLLM 0.26 with an 8B shape, fifteen starts side by side took 78 to 157 seconds each. For 20 of them (40 with a draft
head) a new Python imported everything anew, to say what the class of its model can do; 15 to 49 went to kernels of
Triton, which each process compiled for itself while graphs were captured.
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
"""What engines import while they start; one that a release has not, or that needs what is not there, is left out."""
DEVICE_FILE = "/dev/nvidia-uvm"
"""Open in a process once it has touched an NVIDIA device; a fork of it could not use the device."""


def prepare(architectures: Iterable[str]) -> None:
    """Import what every engine's process would, and say what the models can do.

    vLLM asks a new process about each class of model, so that its own does not touch the device, and each of its
    processes does; a class that is registered as such it asks itself.
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
    except Exception as error:  # it only saves time
        print(f"not prepared: {type(error).__name__}: {str(error)[:160]}", flush=True)


def touched_device() -> bool:
    """Whether this process has opened an NVIDIA device, so that forks of it cannot."""
    try:
        held = [os.readlink(f"/proc/self/fd/{one}") for one in os.listdir("/proc/self/fd")]
    except OSError:
        return False
    return DEVICE_FILE in held


def share_kernels(folder: Path) -> None:
    """Keep Triton's kernels in one folder, and let one process compile a kernel while others that want it wait."""
    folder.mkdir(parents=True, exist_ok=True)
    # Or Inductor says where, for all of Triton in this process: a folder of this engine's own.
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    try:
        import triton
        import triton.compiler
    except ImportError:
        return
    found = once(triton.compiler.compile, folder / "locks")
    triton.compiler.compile = triton.compile = found


def once(compile_kernel: Callable[..., Any], locks: Path) -> Callable[..., Any]:
    """Triton's `compile`, of the same kernel in one process at a time: the next finds it on disk."""
    locks.mkdir(parents=True, exist_ok=True)

    def compile_once(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
        if not hasattr(src, "hash"):
            return compile_kernel(src, target=target, options=options, **more)
        about = f"{src.hash()} {target} {sorted((options or {}).items(), key=str)}"
        with (locks / hashlib.sha256(about.encode()).hexdigest()).open("w") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            return compile_kernel(src, target=target, options=options, **more)

    return compile_once
