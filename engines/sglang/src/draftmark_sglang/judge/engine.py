"""`draftmark judge sglang:…`: SGLang's own attention backends, as released. Importing this imports no SGLang."""

from __future__ import annotations

import importlib.metadata as md
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftmark_contract.judge.item import Item
from draftmark_contract.judge.target import TargetInfo

from .items import probe_items, served_items
from .releases import folder_of, prepare

ON_CPU, ON_GPU, ON_BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
SERVED = {
    "triton": ("its Triton kernels: extend, decode, trees and chains; on a CPU in Triton's interpreter", ON_BOTH),
    "torch_native": ("attention in torch", ON_BOTH),
    "fa3": ("FlashAttention 3, as its compiled kernels bring it", ON_GPU),
    "flashinfer": ("FlashInfer's kernels; on a CPU sizes and indices of its draft steps alone", ON_GPU),
}
"""Backends that run, on the pools of a running scheduler, and where."""
PROBED = {
    "triton": SERVED["triton"][0],
    "flashinfer": SERVED["flashinfer"][0],
    "flashinfer_mla": "the same of its MLA backend",
    "trtllm_mha": "lengths and page tables of its graphs, without its kernels",
    "ascend": "sizes of its graphs' block tables, without an NPU",
    "ngram": "the lengths that n-gram verification leaves behind",
}
"""Backends whose kernels need a device, and whose own sizes and metadata are judged on a CPU."""
LEFT_OUT = {
    "load": "it is no plugin of draftmark",
    "supports": "SGLang's backends answer no question about a geometry",
    "tightness": "SGLang's backends declare no sizes",
    "overflow": "SGLang's backends declare no integer types",
    "proof": "nothing is declared that could be proved",
    "tree_ops": "trees are built and walked by SGLang's workers, not by its attention backends",
    "engine": "rows that the device decides and other forms are draftmark's own interface",
    "late": "the interpreter runs at once",
    "memory": "its buffers are its own",
    "sinks": "no scene has a layer with attention sinks yet",
    "production": "interpreted kernels take their time for long contexts",
    "metadata": "the triton target is judged by what it computes; the others by their own metadata, as sizing.covers",
}


@dataclass(frozen=True)
class SGLang:
    """The engine.

    Attributes:
        release: a released version to judge instead of the installed one, or "".
    """

    release: str = ""
    name = "sglang"
    install = "pip install sglang"

    def at(self, release: str) -> SGLang:
        """The same for a released version, which is downloaded, once, and run as it is."""
        return replace(self, release=release)

    def version(self) -> str | None:
        """Of the installed distribution."""
        try:
            return f"SGLang {self.release or md.version('sglang')}"
        except md.PackageNotFoundError:
            return None

    def targets(self) -> Sequence[TargetInfo]:
        """Those that run, then those whose metadata are judged."""
        served = [TargetInfo(name, what, ON_BOTH if name in PROBED else on) for name, (what, on) in SERVED.items()]
        return [*served, *(TargetInfo(name, what, ON_CPU) for name, what in PROBED.items() if name not in SERVED)]

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """What lets SGLang run without plugins, and on a CPU; with the release's own packages first."""
        found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "SGLANG_PLUGINS": "none"}
        if device == "cpu":
            found |= {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        if self.release:
            prepare(self.release)
            rest = os.environ.get("PYTHONPATH")
            found["PYTHONPATH"] = os.pathsep.join([str(folder_of(self.release)), *([rest] if rest else [])])
        return found

    def open(self, target: str, device: str) -> Backend:
        """One backend. SGLang is imported at its first question."""
        return Backend(target, device)


class Backend:
    """One opened target."""

    left_out: Mapping[str, str] = LEFT_OUT

    def __init__(self, target: str, device: str) -> None:
        self._target, self._device = target, device
        self._kind = device.partition(":")[0]

    @property
    def facts(self) -> Mapping[str, str]:
        """Which releases were judged, on what."""
        told = {"engine": f"SGLang {md.version('sglang')}", "torch": md.version("torch"), "device": self._device}
        if self._target == "triton":
            told["triton"] = md.version("triton") + (", interpreted" if self._kind == "cpu" else "")
        return told

    def items(self) -> Sequence[Item]:
        """Everything it is asked."""
        _, served_on = SERVED.get(self._target, ("", ()))
        served = served_items(self._target, self._device) if self._kind in served_on else []
        return [*served, *(probe_items(self._target) if self._target in PROBED and self._kind == "cpu" else [])]


ENGINE = SGLang()
