"""The worker that a user names on a CPU: `--worker-cls draftmark_vllm.trees.cpu_worker.CpuTreeWorker`.

Apart from the GPU's: with vLLM's CPU worker comes a module that puts placeholders into `torch.cuda`.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from .runner import with_trees


class CpuTreeWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's worker on a CPU."""

    def init_device(self, *given: Any, **more: Any) -> None:
        """As vLLM does, and then its runner serves trees."""
        super().init_device(*given, **more)
        with_trees(self.model_runner)
