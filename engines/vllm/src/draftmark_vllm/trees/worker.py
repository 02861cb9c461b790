"""vLLM worker for draft trees on a GPU: `--worker-cls draftmark_vllm.trees.worker.TreeWorker`."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from .runner import with_trees


class TreeWorker(Worker):  # type: ignore[misc]
    """vLLM's GPU worker, with its model runner extended to draft trees."""

    def init_device(self, *given: Any, **more: Any) -> None:
        """Initialize the device as vLLM does, then extend the model runner to draft trees."""
        super().init_device(*given, **more)
        with_trees(self.model_runner)
