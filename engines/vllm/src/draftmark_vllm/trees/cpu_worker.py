"""vLLM worker for draft trees on a CPU: `--worker-cls draftmark_vllm.trees.cpu_worker.CpuTreeWorker`.

This class is not in the module `worker`, because vLLM's CPU worker puts placeholders into `torch.cuda` when imported.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .runner import with_trees


class CpuTreeWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker, with its model runner extended to draft trees."""

    def init_device(self, *given: Any, **more: Any) -> None:
        """Initialize the device as vLLM does, then extend the model runner to draft trees."""
        super().init_device(*given, **more)
        with_trees(self.model_runner)
