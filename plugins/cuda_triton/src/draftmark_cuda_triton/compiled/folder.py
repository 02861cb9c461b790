"""The kernel store of this process: draftmark's cache folder, and installed packages of compiled kernels."""

from __future__ import annotations

import atexit
import importlib.util
import logging
import os
import shutil
import tempfile
from functools import lru_cache
from pathlib import Path

from draftmark import cache_folder

from .store import Store

SHIPPED = "draftmark_cuda_triton_cubin"
"""Package with compiled kernels in its folder ``kernels``, in the layout of a `Store`."""
logger = logging.getLogger(__name__.partition(".")[0])


def kernel_store() -> Store:
    """Return the store below `draftmark.cache_folder`. If it cannot be written, new kernels last for the process."""
    return _open(cache_folder() / "cuda_triton")


@lru_cache
def _open(root: Path) -> Store:
    shipped = shipped_folders()
    if _is_writable(root):
        return Store(root, shipped)
    scratch = Path(tempfile.mkdtemp(prefix="draftmark-kernels-"))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    logger.warning(
        "kernels are read from %s but cannot be written there, so newly compiled ones last for this process; set "
        "DRAFTMARK_CACHE_DIR to a folder that can be written", root,
    )  # fmt: skip
    return Store(scratch, (root, *shipped))


def shipped_folders() -> tuple[Path, ...]:
    """Return the folders of installed packages with compiled kernels."""
    found = importlib.util.find_spec(SHIPPED)
    places = () if found is None else found.submodule_search_locations or ()
    return tuple(Path(place) / "kernels" for place in places)


def _is_writable(root: Path) -> bool:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(root, os.W_OK)
