"""Imports torch_npu after a check that the import would not end the process, as it does with CUDA builds of torch.

torch_npu 2.13 and 2.14 register an allocator setting that a CUDA build of torch has already registered. The C++ runtime
then ends the process ("Duplicated key"). No exception handler helps, so this module checks the build before the import.
`BackendInfo.runtime` lists this module before torch_npu. Import it instead of torch_npu.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

__all__ = ["check_torch_build", "cuda_build", "torch_npu"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Index of torch's CPU builds; PyPI's torch for x86 is a CUDA build."""


def cuda_build(folder: Path | None = None) -> str | None:
    """Return the version of torch if it is a CUDA build, else None. Reads files and imports nothing.

    Args:
        folder: torch's package folder; None searches for it.
    """
    folder = folder or _torch_folder()
    if folder is None or not any((folder / "lib").glob("*c10_cuda.*")):
        return None
    text = (folder / "version.py").read_text(encoding="utf-8") if (folder / "version.py").is_file() else ""
    found = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    return found[1] if found else "of an unknown version"


def check_torch_build(folder: Path | None = None) -> None:
    """Raise `ImportError`, with the pip command, if importing torch_npu would end the process."""
    version = cuda_build(folder)
    if version is not None:
        release = version.partition("+")[0]
        raise ImportError(
            f"torch {version} is a CUDA build, with which importing torch_npu ends the process; install "
            f"the CPU build: pip install --force-reinstall --no-deps torch=={release} --index-url {CPU_INDEX}"
        )


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


if "torch_npu" not in sys.modules:
    check_torch_build()
import torch_npu  # noqa: E402  (registers the device type "npu" in torch)
