"""Facts that plugins report about their kernels: those compiled ahead of time, and reasons for a choice. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .geometry import Mode

CACHE_VARIABLE, PREPARE_VARIABLE = "DRAFTMARK_CACHE_DIR", "DRAFTMARK_PREPARE"


class Progress(Protocol):
    """Function that a plugin calls after each kernel that it compiled."""

    def __call__(self, done: int, count: int, kernel: str) -> None:
        """Show that `done` of `count` kernels are compiled; `kernel` is the name of the last one."""


@dataclass(frozen=True)
class WarmedKernels:
    """The compiled kernels of some geometries, ready on disk.

    Attributes:
        kernels: number of kernels that are ready.
        compiled: number that this call compiled; the others were found.
        shipped: number found in installed packages of compiled kernels.
        num_bytes: bytes of the kernels on disk.
        folder: folder of the kernels that are not shipped.
        failed: number of further kernels that could not be compiled; the plugin logs each with its error.
    """

    kernels: int
    compiled: int
    shipped: int
    num_bytes: int
    folder: str
    failed: int = 0


@dataclass(frozen=True)
class BatchSize:
    """Size of a batch for which a backend explains its choice of kernels.

    Attributes:
        mode: mode of the batch.
        num_reqs: requests, padding included.
        q_len: rows of each request.
        prefix_len: committed tokens of each request; -1 when the host does not have them.
        tree: the rows are a draft tree, otherwise a chain.
    """

    mode: Mode
    num_reqs: int
    q_len: int
    prefix_len: int = -1
    tree: bool = False


@dataclass(frozen=True)
class KernelChoice:
    """One choice of a backend for a batch.

    Attributes:
        subject: what was chosen, e.g. ``"splits"``.
        chosen: the chosen value.
        reason: why, as a sentence without a period.
        candidates: every value that could be chosen, `chosen` included; empty when there was no alternative.
    """

    subject: str
    chosen: str
    reason: str
    candidates: tuple[str, ...] = ()


def prepares_kernels() -> bool:
    """Return False with DRAFTMARK_PREPARE=0: opening a backend then compiles nothing, for tests of many geometries.

    A plugin that compiles the kernels of a geometry when it opens asks this first. Each kernel then compiles when it
    is launched.
    """
    return os.environ.get(PREPARE_VARIABLE) != "0"


def cache_folder() -> Path:
    """Return draftmark's folder for files that can be computed again; it need not exist.

    DRAFTMARK_CACHE_DIR if it is set, else ``draftmark`` in XDG_CACHE_HOME, else ``~/.cache/draftmark``.
    """
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "draftmark"
