"""Import torch_npu, once what would end the process has been ruled out.

torch_npu 2.13 and 2.14 register an allocator setting that a CUDA build of torch has registered already, and the C++
runtime ends the process ("Duplicated key"). No exception handler helps, so the build is looked at before the import.
This module is named in `BackendInfo.runtime` before torch_npu, and imported where torch_npu would be.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["check_torch_build", "cuda_build", "torch_npu"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Where torch's CPU builds are; PyPI's own torch for x86 is a CUDA build."""


def cuda_build(folder: Path | None = None) -> str | None:
    """The version of a torch that is a CUDA build, or None. Reads files; imports nothing.

    Args:
        folder: torch's package folder; None looks for it.
    """
    folder = folder or _torch_folder()
    if folder is None or not any((folder / "lib").glob("*c10_cuda.*")):
        return None
    text = (folder / "version.py").read_text(encoding="utf-8") if (folder / "version.py").is_file() else ""
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else "of an unknown version"


def check_torch_build(folder: Path | None = None) -> None:
    """Raise `ImportError`, with the pip command, where importing torch_npu would end the process."""
    version = cuda_build(folder)
    if version is not None:
        release = version.partition("+")[0]
        raise ImportError(
            f"torch {version} is a CUDA build, beside which torch_npu ends the process while it is imported; install "
            f"the CPU build: pip install --force-reinstall --no-deps torch=={release} --index-url {CPU_INDEX}"
        )


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


if "torch_npu" not in sys.modules:
    check_torch_build()
import torch_npu  # noqa: E402  (teaches torch the device type "npu")
