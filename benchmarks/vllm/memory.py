"""Memory that several engines of one device share, so that all of them are up at once and take turns.

One process owns two tensors on each device, random numbers both: weights, which every engine of one shape maps as its
own, and KV pages, in which one engine at a time works. So ten engines of an 8B shape take one copy of 16 GB. With
tensor parallelism each rank maps those of its device.
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
"""Elements that are made at a time, beside what keeps them."""
MATRIX = 1 << 20
"""Elements of what counts as a matrix of weights."""
LOAD_FORMAT = "shared_memory"
HANDLES = "DRAFTMARK_SHARED_MEMORY"
"""Names a file with the handles, in the environment of an engine's ranks."""


class Memory:
    """Weights and KV of an engine's process, mapped.

    Attributes:
        weights: bfloat16 ``[elements]``. kv: int8 ``[bytes]``.
    """

    def __init__(self, weights: torch.Tensor, kv: torch.Tensor) -> None:
        self.weights, self.kv = weights, kv
        self._taken = 0

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """The next weights, of a tensor's shape."""
        first, self._taken = self._taken, self._taken + like.numel() + (-like.numel()) % ALIGNMENT
        if self._taken > self.weights.numel():
            raise ValueError(f"the shared weights have {self.weights.numel()} elements, the model more")
        return self.weights[first : first + like.numel()].view(like.shape)

    def adopt(self, model: torch.nn.Module) -> None:
        """Let a model's matrices be the shared ones, its norms ones, and its tables of tokens zeros.

        Each model begins with the first weights, so a draft head has some of its target's.
        """
        self._taken = 0
        for parameter in model.parameters():
            if not parameter.dtype.is_floating_point:
                parameter.data.zero_()
            elif parameter.dim() < 2:
                parameter.data.fill_(1)
            else:
                parameter.data = self.take(parameter.data)
        # vLLM's EAGLE-3 heads say so when a checkpoint has it; else they would draft with the target's vocabulary.
        if hasattr(model, "draft_id_to_target_id"):
            model.has_own_lm_head = True

    @contextlib.contextmanager
    def matrices(self) -> Iterator[None]:
        """Give what a model allocates as matrices within this block out of the shared tensor, any part of it.

        They are mapped anew when it loads (`adopt`). Without this each engine takes all weights once more while it
        starts, so that no two could start at a time.
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
        """Give what vLLM allocates as KV within this block out of the shared tensor."""
        first = 0

        def zeros(*size: Any, **options: Any) -> torch.Tensor:
            nonlocal first
            if options.get("dtype") is not torch.int8 or len(size) != 1 or not isinstance(size[0], int):
                return torch.zeros(*size, **options)
            start, first = first, first + size[0] + (-size[0]) % ALIGNMENT
            if first > self.kv.numel():
                raise ValueError(f"the shared KV has {self.kv.numel()} bytes, the engine asks for more")
            return self.kv[start : start + size[0]]

        with _Instead(torch.zeros, zeros):
            yield


class _Instead(TorchFunctionMode):
    """Within its block calls of one of torch's functions are another's, in which they are torch's own again.

    The name in torch keeps its function: torch's compiler, which may look at it for the first time within the block,
    would else not know that function behind it.
    """

    def __init__(self, function: Callable[..., Any], other: Callable[..., Any]) -> None:
        super().__init__()
        self._function, self._other = function, other

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As torch's protocol asks."""
        return (self._other if func is self._function else func)(*args, **(kwargs or {}))


def make(
    weights: int, kv_bytes: int, device: str, kv_dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate both, filled with random numbers; `weights` counts bfloat16 elements, `kv_dtype` is what engines take
    the pages for.
    """
    held = torch.empty(weights, dtype=torch.bfloat16, device=device)
    pages = torch.empty(kv_bytes // kv_dtype.itemsize, dtype=kv_dtype, device=device)
    for tensor, std in ((held, WEIGHT_STD), (pages, 1.0)):
        for piece in tensor.split(CHUNK):
            piece.copy_(torch.empty_like(piece, dtype=torch.bfloat16).normal_(0, std))
    return held, pages.view(torch.int8)


class Mapped:
    """The memory of this process's device, mapped when it is first asked for: by then a rank has chosen its device.

    Args:
        handles: for each device, `Memory`'s tensors as another process has pickled them.
    """

    def __init__(self, handles: Sequence[bytes]) -> None:
        self._handles = handles
        self._held: Memory | None = None

    def memory(self) -> Memory:
        """Weights and KV."""
        if self._held is None:
            import pickle

            device = torch.cuda.current_device() if torch.cuda.is_available() else 0
            self._held = Memory(*pickle.loads(self._handles[device]))
        return self._held


def register(mapped: Mapped) -> None:
    """Teach vLLM of this process to load weights and place KV there: by its own registry of loaders, and by `pages`.

    A process that has learned it, or is a fork of one that has, keeps what it has.
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
        """Weights of the first engine that loads them, for every other one too."""

        def download_model(self, model_config: Any) -> None:
            """Nothing to fetch."""

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
