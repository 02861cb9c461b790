"""Memory that several engines of one device share, so that all of them are up at once and take turns.

One process owns two tensors on the device, random numbers both: weights, which every engine of one shape maps as its
own, and KV pages, in which one engine at a time works. So ten engines of an 8B shape take one copy of 16 GB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

WEIGHT_STD = 0.02
ALIGNMENT = 512
CHUNK = 1 << 28
LOAD_FORMAT = "shared_memory"


class Memory:
    """Weights and KV of an engine's process, mapped.

    Attributes:
        weights: bfloat16 ``[elements]``. kv: int8 ``[bytes]``. lock: held while a model is made, as it allocates
            weights of its own before it maps these.
    """

    def __init__(self, weights: torch.Tensor, kv: torch.Tensor, lock: Any) -> None:
        self.weights, self.kv, self.lock = weights, kv, lock
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
    def pages(self) -> Iterator[None]:
        """Give what vLLM allocates as KV within this block out of the shared tensor."""
        usual, first = torch.zeros, 0

        def zeros(*size: Any, **options: Any) -> torch.Tensor:
            nonlocal first
            if options.get("dtype") is not torch.int8 or len(size) != 1 or not isinstance(size[0], int):
                return usual(*size, **options)
            start, first = first, first + size[0] + (-size[0]) % ALIGNMENT
            if first > self.kv.numel():
                raise ValueError(f"the shared KV has {self.kv.numel()} bytes, the engine asks for more")
            return self.kv[start : start + size[0]]

        torch.zeros = zeros  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.zeros = usual


def make(weights: int, kv_bytes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate both, filled with random numbers; `weights` counts bfloat16 elements."""
    held = torch.empty(weights, dtype=torch.bfloat16, device=device)
    pages = torch.empty(kv_bytes // 2, dtype=torch.bfloat16, device=device)
    for tensor, std in ((held, WEIGHT_STD), (pages, 1.0)):
        for first in range(0, tensor.numel(), CHUNK):
            tensor[first : first + CHUNK].normal_(0, std)
    return held, pages.view(torch.int8)


def register(memory: Memory) -> None:
    """Teach vLLM of this process to load weights and place KV there: by its own registry of loaders, and by `pages`."""
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
            memory.adopt(model)

        def load_model(self, *given: Any, **more: Any) -> torch.nn.Module:
            with memory.lock:
                model: torch.nn.Module = super().load_model(*given, **more)
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
            return model

    for runner in (gpu_model_runner.GPUModelRunner, model_runner.GPUModelRunner):
        _with_pages(runner, memory)


def _with_pages(runner: Any, memory: Memory) -> None:
    usual = runner.initialize_kv_cache

    def initialize_kv_cache(self: Any, *given: Any, **more: Any) -> Any:
        with memory.pages():
            return usual(self, *given, **more)

    runner.initialize_kv_cache = initialize_kv_cache
