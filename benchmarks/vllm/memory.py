"""Memory that several engines share on one device, so that all of them are ready while one at a time works.

One process owns two tensors of random numbers on each device: weights and KV pages. Every engine of one shape maps the
weights as its own. One engine at a time works in the KV pages. So ten engines of an 8B shape need one copy of 16 GB.
With tensor parallelism each rank maps the tensors of its device.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

WEIGHT_STD = 0.02
ALIGNMENT = 512
CHUNK = 1 << 24
"""Elements that are generated at a time; the temporary buffer has this size."""
MATRIX = 1 << 20
"""Fewest elements of an allocation that counts as a weight matrix."""
LOAD_FORMAT = "shared_memory"
HANDLES = "DRAFTMARK_SHARED_MEMORY"
"""Environment variable of an engine's ranks: path of a file with the handles."""


class Memory:
    """Shared weights and KV, mapped into an engine's process.

    Attributes:
        weights: bfloat16 ``[elements]``.
        kv: int8 ``[bytes]``.
    """

    def __init__(self, weights: torch.Tensor, kv: torch.Tensor) -> None:
        self.weights, self.kv = weights, kv
        self._taken = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return the next weights that are not taken yet, in the shape of `like`."""
        first, self._taken = self._taken, self._taken + like.numel() + (-like.numel()) % ALIGNMENT
        if self._taken > self.weights.numel():
            raise ValueError(f"the shared weights have {self.weights.numel()} elements, but the model needs more")
        return self.weights[first : first + like.numel()].view(like.shape)

    def adopt(self, model: torch.nn.Module) -> None:
        """Replace a model's matrices by shared weights; fill norms with ones, and integer tables with zeros.

        Each model starts at the first weight, so a draft head shares some weights with its target.
        """
        self._taken = 0
        for parameter in model.parameters():
            if not parameter.dtype.is_floating_point:
                parameter.data.zero_()
            elif parameter.dim() < 2:
                parameter.data.fill_(1)
            else:
                parameter.data = self.take(parameter.data)
        # vLLM's EAGLE-3 heads set this flag when their checkpoint has such a table. Without the flag the head would
        # draft over the target's vocabulary.
        if hasattr(model, "draft_id_to_target_id"):
            model.has_own_lm_head = True

    @contextlib.contextmanager
    def matrices(self) -> Iterator[None]:
        """Take a model's matrices that are allocated within this block from the start of the shared weights.

        `adopt` maps them anew when the model loads. Without this block each engine would allocate all weights once more
        during its start, so no two engines could start at the same time.
        """

        def empty(*size: Any, **options: Any) -> torch.Tensor:
            wanted = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
            numbers = len(wanted) > 1 and all(isinstance(one, int) for one in wanted)
            kind = options.get("dtype") or torch.get_default_dtype()
            if not numbers or kind is not self.weights.dtype or not MATRIX <= math.prod(wanted) <= self.weights.numel():
                return torch.empty(*size, **options)
            return self.weights[: math.prod(wanted)].view(*wanted)

        with _Instead(torch.empty, empty):
            yield

    @contextlib.contextmanager
    def pages(self) -> Iterator[None]:
        """Context manager: KV that vLLM allocates within the block comes from the shared tensor."""
        first = 0

        def zeros(*size: Any, **options: Any) -> torch.Tensor:
            nonlocal first
            if options.get("dtype") is not torch.int8 or len(size) != 1 or not isinstance(size[0], int):
                return torch.zeros(*size, **options)
            start, first = first, first + size[0] + (-size[0]) % ALIGNMENT
            if first > self.kv.numel():
                raise ValueError(f"the shared KV has {self.kv.numel()} bytes, but the engine needs more; set kv_bytes")
            return self.kv[start : start + size[0]]

        with _Instead(torch.zeros, zeros):
            yield


class _Instead(TorchFunctionMode):
    """Torch function mode that replaces the calls of one torch function. The replacement itself sees unchanged torch.

    The name in torch is not patched: torch's compiler may look at the function for the first time within the block, and
    would not recognize a patched one.
    """

    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._other = function, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the replacement or the function, as torch's protocol requires."""
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))


def make(
    weights: int, kv_bytes: int, device: str, kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate weights and KV pages, and fill both with random numbers.

    Args:
        weights: bfloat16 elements of the weights.
        kv_bytes: bytes of the KV pages.
        device: of both tensors.
        kv_dtype: dtype in which engines read the pages.

    Returns:
        weights: bfloat16 ``[weights]``.
        kv: int8 ``[kv_bytes]``.
    """
    held = torch.empty(weights, dtype=torch.bfloat16, device=device)
    pages = torch.empty(kv_bytes // kv_dtype.itemsize, dtype=kv_dtype, device=device)
    for tensor, std in ((held, WEIGHT_STD), (pages, 1.0)):
        for piece in tensor.split(CHUNK):
            piece.copy_(torch.empty_like(piece, dtype=torch.bfloat16).normal_(0, std))
    return held, pages.view(torch.int8)


class Mapped:
    """Shared memory of this process's device, mapped at its first use: a rank has selected its device by then.

    Args:
        handles: for each device, the tensors of `Memory`, pickled by another process.
    """

    def __init__(self, handles: Sequence[bytes]) -> None:
        self._handles = handles
        self._held: Memory | None = None

    def memory(self) -> Memory:
        """Return the shared weights and KV, after mapping them into this process at the first call."""
        if self._held is None:
            import pickle

            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
            self._held = Memory(*pickle.loads(self._handles[device]))
        return self._held


def register(mapped: Mapped) -> None:
    """Let vLLM in this process load weights from the shared memory, and place its KV there.

    Weights use vLLM's registry of model loaders, KV uses `Memory.pages`. Does nothing if this process, or the process
    that it was forked from, has registered a memory already.
    """
    global _registered
    if _registered:
        return
    _registered = True
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import model_runner

    @register_model_loader(LOAD_FORMAT)
    class SharedLoader(BaseModelLoader):  # type: ignore[misc]
        """Loader that maps the shared weights into a model."""

        def download_model(self, model_config: Any) -> None:
            """Do nothing: the shared weights are in memory already."""

        def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
            mapped.memory().adopt(model)

        def load_model(self, *given: Any, **more: Any) -> torch.nn.Module:
            with mapped.memory().matrices():
                model: torch.nn.Module = super().load_model(*given, **more)
            return model

    for runner in (gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner):
        _with_pages(runner, mapped)


_registered = False


def _with_pages(runner: Any, mapped: Mapped) -> None:
    usual = runner.initialize_kv_cache

    def initialize_kv_cache(self: Any, *given: Any, **more: Any) -> Any:
        with mapped.memory().pages():
            return usual(self, *given, **more)

    runner.initialize_kv_cache = initialize_kv_cache
