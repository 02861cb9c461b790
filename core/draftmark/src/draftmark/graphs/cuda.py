"""CUDA graphs: one `torch.cuda.CUDAGraph` per key, all in one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import CaptureError
from .keyed import KeyedGraphState


class CudaGraph:
    """CUDA graph of a captured step; `CudaGraphState` documents the capture.

    Attributes:
        outputs: return value of the step; its memory is uninitialized until the first replay.
        pool_bytes: bytes by which the shared pool grew.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        *,
        pool: Any,
        stream: torch.cuda.Stream,
    ) -> None:
        self._graph = torch.cuda.CUDAGraph()
        try:
            # "thread_local": a harmless CUDA call of another thread (a pinned allocation, NCCL's watchdog) must not
            # invalidate this capture.
            recording = torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with _without_garbage_collection(), recording:
                # Reserved bytes, not allocated bytes: the pool keeps the memory of freed intermediates for replays.
                # Read inside the block, because entering it may empty the ordinary cache.
                reserved = torch.cuda.memory_reserved(stream.device)
                self.outputs = step()
        except RuntimeError as error:
            if not _is_capture_failure(error):
                raise
            raise CaptureError(
                f"the step cannot be captured: {_first_line(_root(error))}; capture it as a RecordedGraph on the CPU, "
                "which names the operator and the remedy"
            ) from error
        self.pool_bytes = torch.cuda.memory_reserved(stream.device) - reserved

    def replay(self) -> None:
        """Enqueue the graph on the current stream; does not wait for it."""
        self._graph.replay()


class CudaGraphState(KeyedGraphState):
    """`GraphState` with CUDA graphs.

    Capture first runs the step once on a side stream, because lazy initialization, autotuning and Triton compilation
    are not allowed while a stream captures. The static tensors must therefore describe a valid batch at capture,
    padding rows included, and the step's in-place effects happen once. The capture itself executes nothing.

    All graphs share one memory pool. The outputs of one graph may lie in memory that another graph writes. Outputs are
    therefore valid until the next replay of any key, and graphs of one state must not replay concurrently. Capture the
    largest batch first, so that smaller ones reuse its memory.

    Args:
        device: the CUDA device; `replay` uses its current stream.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        super().__init__()
        self._device = torch.device(device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def _record(self, step: Callable[[], Any]) -> CudaGraph:
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "a graph cannot be captured inside another capture; capture them one after the other"
                )
            self._warm_up(step)
            return CudaGraph(step, pool=self._pool, stream=self._stream)

    def _warm_up(self, step: Callable[[], Any]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Keep Python from freeing an older graph or event during a capture: that calls CUDA, and ends the capture."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _is_capture_failure(error: BaseException) -> bool:
    """Return True for an error of CUDA capture, recognizable only by its text; other errors come from the step."""
    return "captur" in str(error).lower() or (error.__context__ is not None and _is_capture_failure(error.__context__))


def _root(error: BaseException) -> BaseException:
    """Return the first error of the chain; ending an invalid capture raises another error without information."""
    return _root(error.__context__) if error.__context__ is not None else error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
