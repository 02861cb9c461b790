"""Makes the folder of other libraries' kernel files that `stubs` imports, from their wheels.

    pip download --no-deps fla-core==0.6.0 vllm==0.33.0 sglang==0.5.23
    python -m benchmarks.state.carry FOLDER *.whl

It takes Python files and tuned configurations: 7 MB for a machine without a network.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

TAKEN = {
    "fla_core": ("fla/",),
    "vllm": ("vllm/third_party/flash_linear_attention/", "vllm/model_executor/layers/mamba/ops/"),
    "sglang": (
        "sglang/kernels/ops/attention/fla/", "sglang/kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py",
        "sglang/kernels/ops/mamba/", "sglang/kernels/ops/memory/ptr_table.py",
    ),
}  # fmt: skip
"""Paths in each wheel, by the first part of its file name."""


def main(folder: str, *wheels: str) -> None:
    """Unpack the files of each wheel."""
    for wheel in wheels:
        taken = TAKEN[Path(wheel).name.partition("-")[0]]
        with zipfile.ZipFile(wheel) as archive:
            names = [
                name
                for name in archive.namelist()
                if name.endswith(".dist-info/METADATA")
                or (name.startswith(taken) and (name.endswith(".py") or "NVIDIA_H" in name))
            ]
            archive.extractall(folder, names)
            print(f"{wheel}: {len(names)} files")


if __name__ == "__main__":
    main(*sys.argv[1:])
