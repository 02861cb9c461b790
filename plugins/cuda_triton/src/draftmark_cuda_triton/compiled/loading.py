"""Compiled kernels for Triton's launches: from the store if they are there, else compiled now and stored.

A Triton kernel calls ``self.compile`` with its source, target and options when it meets a new specialization.
`use_store` replaces that attribute, so Triton's own specialization decides which stored kernel is right.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import ASTSource, CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from ..switches import is_tested_triton, logger
from .assembler import ASSEMBLER
from .folder import kernel_store
from .host_code import HOST_CODE
from .source import KernelSource
from .store import Entry

MAX_THREADS = 8
"""Maximum threads that load kernels at once."""


@dataclass
class Counts:
    """Counts of kernels in this process.

    Attributes:
        loaded: kernels loaded from the store.
        compiled: kernels compiled by this process, outside of `prepare`.
        after_start: those of `compiled` that followed the first `prepare`, so a request waited for them.
        prepared: a backend has prepared its kernels.
    """

    loaded: int = 0
    compiled: int = 0
    after_start: int = 0
    prepared: bool = False


COUNTS = Counts()


def use_store(kernel: JITFunction[Any], device: int) -> None:
    """Make `kernel` load from the store on `device`; a newer Triton than tested keeps its own cache."""
    if is_tested_triton():
        kernel.device_caches[device]  # sets `compile`
        kernel.compile = load_or_compile


def load_or_compile(source: ASTSource, target: GPUTarget, options: dict[str, Any], **others: Any) -> CompiledKernel:
    """Return the compiled kernel, with the arguments and the result of `triton.compile`."""
    wanted, store = KernelSource.of(source, target, options), kernel_store()
    entry = store.find(wanted)
    if entry is not None:
        COUNTS.loaded += 1
        return load(entry, source)
    COUNTS.compiled += 1
    COUNTS.after_start += COUNTS.prepared
    logger.log(
        logging.WARNING if COUNTS.prepared else logging.INFO,
        "kernel %s compiles %s for sm_%d; `draftmark warm cuda_triton` compiles kernels ahead of time",
        wanted.name, "while a request waits" if COUNTS.prepared else "now", wanted.arch,
    )  # fmt: skip
    with ASSEMBLER.selected():
        compiled = triton.compile(source, target=target, options=options, **others)
    try:
        store.put(wanted, compiled.metadata_group)
    except OSError as error:
        logger.warning("kernel %s is not stored in %s: %s", wanted.name, store.root, error)
    return compiled


def load(entry: Entry, source: ASTSource) -> CompiledKernel:
    """Return the stored kernel as Triton's object. Its machine code reaches the GPU when it is first launched."""
    metadata = next(path for name, path in entry.files.items() if name.endswith(".json"))
    number = json.loads(Path(metadata).read_text(encoding="utf-8"))["hash"]
    return CompiledKernel(source, dict(entry.files), number)


def finish_loading(kernels: Sequence[CompiledKernel]) -> list[Exception]:
    """Load machine code onto the current device, in parallel threads.

    Triton 3.6 calls a C compiler for each kernel's launcher, so one kernel after another would take seconds.

    Returns:
        The errors of the kernels that could not be loaded.
    """
    device, errors = driver.active.get_current_device(), list[Exception]()

    def finish(kernel: CompiledKernel) -> None:
        try:
            with torch.cuda.device(device) if torch.cuda.is_available() else nullcontext():
                kernel.run  # noqa: B018  # the property loads the kernel
        except Exception as error:
            errors.append(error)

    with HOST_CODE.stored_in(kernel_store().host_code), ThreadPoolExecutor(MAX_THREADS) as threads:
        for done in [threads.submit(copy_context().run, finish, one) for one in kernels]:
            done.result()
    return errors
