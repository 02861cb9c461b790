"""Entry point of `draftmark judge sglang:…`, for SGLang's own backends as released. Importing it imports no SGLang."""

from __future__ import annotations

import importlib.metadata as md
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from draftmark.errors import DraftmarkError
from draftmark_contract.judge.devices import device_of
from draftmark_contract.judge.target import TargetInfo
from draftmark_contract.runner.item import Item

from . import outside
from .items import probe_items, served_items
from .releases import folder_of, prepare, triton_folder

ON_CPU, ON_GPU, ON_BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")
SERVED = {
    "triton": ("Triton kernels: extend, decode, trees and chains; on a CPU in Triton's interpreter", ON_BOTH),
    "torch_native": ("attention in torch", ON_BOTH),
    "fa3": ("FlashAttention 3's compiled kernels", ON_GPU),
    "flashinfer": ("FlashInfer's kernels; on a CPU only sizes and indices of its draft steps", ON_GPU),
    "triton_mla": ("Triton kernels over the rows of MLA layers; on a CPU in Triton's interpreter", ON_BOTH),
    "fa3_mla": ("FlashAttention 3 over the rows of MLA layers; on a CPU its calls for draft trees only", ON_GPU),
    "flashmla": ("FlashMLA's compiled kernels, for Hopper", ON_GPU),
}
"""Backends that run on the pools of a running scheduler: a description, and the devices."""
NEEDED = {"fa3_mla": "a Hopper GPU", "flashmla": "a Hopper GPU and sgl-kernel's FlashMLA"}
"""Devices that a target needs in particular."""
PROBED = {
    "triton": SERVED["triton"][0],
    "flashinfer": SERVED["flashinfer"][0],
    "flashinfer_mla": "sizes and indices of the MLA backend's draft steps",
    "fa3_mla": SERVED["fa3_mla"][0],
    "trtllm_mha": "lengths and page tables of its CUDA graphs, without its kernels",
    "ascend": "sizes of its graphs' block tables, without an NPU",
    "ngram": "the lengths after an n-gram verification",
}
"""Backends with sizes and metadata that are judged on a CPU, without their kernels."""
RECURRENT = {
    "gdn": "Gated DeltaNet (Qwen3-Next, Qwen3.5): chains and trees, in Triton's interpreter",
    "kda": "Kimi Delta Attention: chains, trees and ragged chains, in Triton's interpreter",
    "mamba2": "Mamba2 (Nemotron-H, Falcon-H1): chains and trees, in Triton's interpreter",
}
"""SGLang's linear-attention backends with Triton kernels."""
LEFT_OUT = {
    "load": "the backend is not a draftmark plugin",
    "supports": "SGLang's backends have no function that accepts or rejects a geometry",
    "tightness": "SGLang's backends declare no sizes",
    "overflow": "SGLang's backends declare no integer types",
    "proof": "SGLang's backends declare nothing that could be proved",
    "tree_ops": "SGLang's workers, not its attention backends, build and verify trees",
    "engine": "row counts on the device and other forms exist only in draftmark's interface",
    "late": "Triton's interpreter runs kernels synchronously",
    "memory": "the backend allocates its buffers itself",
    "sinks": "no scene has a layer with attention sinks yet",
    "production": "interpreted kernels are too slow for long contexts",
    "metadata": "the triton target is judged by its output, the others by their own metadata in sizing.covers",
    "batch_invariance": "only plugins declare batch invariance",
    "black_box": "a rule about a plugin in a process without the suite",
    "process": "SGLang itself changes settings of its process, so a backend's changes cannot be told apart",
    "second_lives": "a rule about captures that draftmark makes itself",
    "turns": "a rule about several opened backends of one plugin",
    "sizes": "runs with plugins only; the judge draws its own sizes",
    "pools": "SGLang allocates one buffer for each layer",
    "forks": "no scene has requests that share a prefix yet",
    "windows": "SGLang frees pages left of a window itself",
    "drafters": "no scene has a draft model yet",
    **dict.fromkeys(
        ("state", "state_graphs", "state_history", "state_late", "state_sizing"),
        "a rule about recurrent state; see gdn, kda and mamba2",
    ),
    "chosen": "no scene has lists of chosen keys yet",
    **dict.fromkeys(
        ("latent", "latent_formats", "latent_graphs", "latent_lse", "latent_sizing", "narrow_values"),
        "rules about plugins; the MLA targets judge latent rows by rules of outputs, stores and graphs",
    ),
}


LISTED = {*SERVED, *PROBED, *RECURRENT}
"""Targets that the judge lists. Every other target comes from outside of SGLang."""


@dataclass(frozen=True)
class SGLang:
    """SGLang as an engine of `draftmark judge`.

    Attributes:
        release: a released version to judge instead of the installed one; "" for the installed one.
    """

    release: str = ""
    name = "sglang"
    install = "pip install sglang"

    def at(self, release: str) -> SGLang:
        """Return the engine for a released version, which is downloaded once and run unchanged."""
        return replace(self, release=release)

    def version(self) -> str | None:
        """Return the name and version of the judged release; None if SGLang is not installed."""
        try:
            return f"SGLang {self.release or md.version('sglang')}"
        except md.PackageNotFoundError:
            return None

    def targets(self) -> Sequence[TargetInfo]:
        """Return SGLang's backends that can be judged: first those that run, then those with metadata checks only."""
        served = [TargetInfo(name, what, ON_BOTH if name in PROBED else on) for name, (what, on) in SERVED.items()]
        probed = [TargetInfo(name, what, ON_CPU) for name, what in PROBED.items() if name not in SERVED]
        recurrent = [TargetInfo(name, what, ON_CPU) for name, what in RECURRENT.items()]
        return [*served, *probed, *recurrent]

    def resolve(self, named: str) -> TargetInfo | None:
        """Return a target for a class of another package, or for a name that SGLang or a plugin registers."""
        if not outside.is_named(named):
            return None
        return TargetInfo(named, "a backend from outside of SGLang", any_device=True)

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return environment variables to run SGLang on a CPU if needed, in the chosen release.

        Its own backends run without plugins. Backends from outside run with the installed plugins.
        """
        loaded = "none" if target in LISTED else outside.plugin_setting()
        found = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "SGLANG_PLUGINS": loaded}
        first = []
        if target in RECURRENT:
            found |= {"TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
            first = [str(triton_folder())]
        elif device_of(device).host:
            found |= {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
        if self.release:
            prepare(self.release)
            first.append(str(folder_of(self.release)))
        if first:
            rest = os.environ.get("PYTHONPATH")
            found["PYTHONPATH"] = os.pathsep.join([*first, *([rest] if rest else [])])
        return found

    def open(self, target: str, device: str) -> Backend:
        """Open one backend. SGLang is imported when the first check runs.

        Raises:
            DraftmarkError: torch sees no device of this type.
        """
        try:
            device_of(device).open()
        except DraftmarkError as error:
            needed = NEEDED.get(target, "a GPU")
            raise DraftmarkError(
                f"{str(error).partition(';')[0]}; run sglang:{target} on a machine with {needed}"
            ) from error
        return Backend(target, device)


class Backend:
    """Provides the judge's items (checks) for one of SGLang's attention backends on one device."""

    def __init__(self, target: str, device: str) -> None:
        self._target, self._device = target, device
        self._kind = device.partition(":")[0]
        self._outside = None if target in LISTED else outside.find(target, device)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules without an item, or modules of rules, each with the reason."""
        if self._target not in RECURRENT:
            return LEFT_OUT
        from .states import target

        return target.left_out()

    @property
    def facts(self) -> Mapping[str, str]:
        """Versions of SGLang, torch and Triton, and the device."""
        facts = {"engine": f"SGLang {md.version('sglang')}", "torch": md.version("torch"), "device": self._device}
        if self._outside is not None:
            facts["backend"] = outside.about(self._outside)
        if self._target in ("triton", "triton_mla", *RECURRENT):
            facts["triton"] = md.version("triton") + (", interpreted" if self._kind == "cpu" else "")
        return facts

    def items(self) -> Sequence[Item]:
        """Return all items (checks) of this backend."""
        if self._target in RECURRENT:
            from .states import target

            return target.items(self._target)
        if self._outside is not None:
            return served_items(self._target, self._device, outside=True)
        _, served_on = SERVED.get(self._target, ("", ()))
        served = served_items(self._target, self._device) if self._kind in served_on else []
        return [*served, *(probe_items(self._target) if self._target in PROBED and self._kind == "cpu" else [])]


ENGINE = SGLang()
