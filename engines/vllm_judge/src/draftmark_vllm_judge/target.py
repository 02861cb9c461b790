"""Lets the judge test one vLLM backend."""

from __future__ import annotations

import importlib.metadata as md
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from draftmark import Geometry
from draftmark.errors import DraftmarkError
from draftmark_contract.check import Unjudged
from draftmark_contract.judge.devices import device_of
from draftmark_contract.judge.driver import EngineCapabilities
from draftmark_contract.judge.questions import questions
from draftmark_contract.runner.item import Item

from .config import FP8
from .driver import VllmDriver
from .interpreter import interprets
from .out_of_tree import about
from .predicates import page_step

NO_DECLARED_SIZES = (
    "vLLM's backends declare no buffers, so no declared size can be compared with the sizes that batches need"
)
LEFT_OUT = {
    "load": "a rule about how a plugin is loaded; vLLM's backends are not plugins",
    "supports": "a rule about supports(); refusals by vLLM's predicates are counted as not served",
    "sizing": NO_DECLARED_SIZES,
    "tightness": NO_DECLARED_SIZES,
    "overflow": NO_DECLARED_SIZES,
    "proof": NO_DECLARED_SIZES,
    "metadata": "a backend's own metadata has no declared meaning; outputs and KV are checked instead",
    "guards": "the backend allocates its own buffers, so there are no guard words around them",
    "purity": "a rule about plan() and write_metadata(), which vLLM's backends do not have",
    "tree_ops": "vLLM has no draft trees",
    "late": "the rule needs buffers that the core stages for a backend",
    "padding": "only plugins declare padded rows",
    "memory": "a rule about two opened backends of one plugin",
    "engine": "a rule about forms and modes that vLLM does not have",
    "layers": "a rule about shapes that differ within one builder's layers",
    "history": "a rule about poisoned buffers of the backend's own",
    "inputs": "vLLM runs a forward in one gradient mode",
    "graphs": "a rule about captures that draftmark makes itself",
    "repeats": "a rule about captures that draftmark makes itself",
    "production": "runs on a device only",
    "numerics": "needs a KV pool without reserved pages, which vLLM's shapes do not allow here",
    "sinks": "no case has a layer with attention sinks yet",
    "batch_invariance": "only plugins declare batch invariance",
    "black_box": "a rule about a plugin in a process without the suite",
    "process": "vLLM itself changes settings of its process, so a backend's changes cannot be told apart",
    "second_lives": "a rule about captures that draftmark makes itself",
    "turns": "a rule about several opened backends of one plugin",
    "sizes": "runs with plugins only; the judge draws its own sizes",
    "pools": "vLLM allocates one pool for each layer",
    "forks": "no case has requests that share a prefix yet",
    "windows": "vLLM frees pages left of a window itself",
    "drafters": "no case has a draft model yet",
    **dict.fromkeys(
        ("state", "state_graphs", "state_history", "state_late", "state_sizing"),
        "a rule about recurrent state; see GDN_ATTN and MAMBA2_ATTN",
    ),
    "chosen": "no case has lists of chosen keys yet",
    **dict.fromkeys(
        ("latent", "latent_formats", "latent_graphs", "latent_lse", "latent_sizing", "narrow_values"),
        "no case has a layer with latent rows or narrow values yet",
    ),
}


class VllmTarget:
    """Describes one vLLM backend to the judge; implements `draftmark_contract.judge.target.Target`."""

    def __init__(self, name: str, backend: Any, device: str) -> None:
        self.name, self.backend, self.device = name, backend, device

    @property
    def facts(self) -> Mapping[str, str]:
        """Releases of vLLM and torch, and the device."""
        import vllm

        found = {"engine": f"vLLM {vllm.__version__}", "torch": f"torch {torch.__version__}"}
        if not self.backend.__module__.startswith("vllm."):
            found["backend"] = about(self.backend)
        name = device_of(self.device).name
        return found | {"device": f"{name}, in Triton's interpreter" if self.interpreted else name}

    @property
    def interpreted(self) -> bool:
        """True if Triton's interpreter runs the backend's kernels."""
        return device_of(self.device).host and interprets(self.name)

    @property
    def left_out(self) -> Mapping[str, str]:
        """Contract rules that the judge cannot test on vLLM's backends: from rule module to reason."""
        return LEFT_OUT

    def caps(self) -> EngineCapabilities:
        """Return the capabilities by which the judge chooses the items common to all engines."""
        return EngineCapabilities(
            open=self.open,
            device=self.device,
            page_sizes=page_step(self.backend),
            dtypes=query_dtypes(self.backend.supported_dtypes, not device_of(self.device).host),
            slow=self.interpreted,
        )

    def open(self, geometry: Geometry, num_pages: int) -> VllmDriver:
        """Return a driver that runs this backend on layers of a geometry.

        Raises:
            Unjudged: Triton's interpreter lacks the dtype.
        """
        if self.interpreted and "bfloat16" in (geometry.attention.q_dtype, geometry.attention.kv_dtype):
            raise Unjudged("Triton's interpreter has no bfloat16 arithmetic")
        if self.interpreted and geometry.attention.kv_dtype == FP8:
            raise Unjudged("vLLM's Triton kernels store fp8 KV only on devices that report support for it")
        return VllmDriver(self.backend, geometry, num_pages, self.device)

    def items(self) -> Sequence[Item]:
        """Return the judge items common to all engines, then the items that only vLLM has."""
        from . import drafting

        caps = self.caps()
        return [*questions(caps), *drafting.questions(caps)]


class MlaTarget(VllmTarget):
    """Describes one vLLM backend for MLA layers to the judge."""

    @property
    def left_out(self) -> Mapping[str, str]:
        """Rules without an item. Items of MLA layers have the rules of ordinary layers."""
        latent = ("latent", "latent_graphs", "latent_lse", "latent_sizing")
        return {**LEFT_OUT, **dict.fromkeys(latent, "MLA layers are checked under rules 22, 29, 47 and 48")}

    def items(self) -> Sequence[Item]:
        """Return the items of MLA layers."""
        from . import latent

        return latent.items(self.backend, self.name, self.device)


def query_dtypes(supported: Iterable[Any], on_gpu: bool) -> tuple[str, ...]:
    """Return names of the query dtypes to test, among the dtypes that a backend supports.

    float32 is left out on a GPU. Triton rounds its products to TF32 there, an error of 1e-3, and engines may do so on
    purpose. The float32 items need float32 precision.
    """
    names = (str(one).removeprefix("torch.") for one in supported)
    return tuple(name for name in names if not (on_gpu and name == "float32"))


def prepare_cpu(name: str, version: str) -> None:
    """Request AMX instructions from the operating system, as a server's first matrix products do before attention runs.

    Raises:
        DraftmarkError: vLLM's kernels are absent, because its library was built for another torch.
    """
    from vllm import _custom_ops

    if name == "CPU_ATTN" and not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        needed = [one for one in md.requires(version.split(" ")[0]) or () if one.startswith("torch==")]
        raise DraftmarkError(
            f"the kernels of {version} do not load with torch {torch.__version__} ({_custom_ops.__name__} has "
            f"none); install {needed[0].partition(';')[0] if needed else 'the torch that it requires'}"
        )
    init_amx = getattr(torch.cpu, "_init_amx", None)
    if init_amx is not None:
        init_amx()
    torch.set_num_threads(1)
