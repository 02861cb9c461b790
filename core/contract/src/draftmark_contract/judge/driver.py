"""Interface between the engine-independent items and a backend: an attention layer that runs steps as its engine does.

An engine implements `Driver` and provides `EngineCapabilities`. `questions` builds the items from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import torch

from draftmark.geometry import AttentionShape, Geometry

from .step import Step

SCALES = (0.5, 2.0)
"""Scales of k and v with fp8 KV: real value = stored value x scale, as in `harness.tensors`."""


class Capturable(IntEnum):
    """Kinds of batches for which a backend declares full CUDA graphs."""

    NONE = 0
    ONE_ROW = 1
    """Batches with one row per request."""
    UNIFORM = 2
    """Batches in which every request has an equal number of rows."""
    ANY = 3


class Driver(Protocol):
    """Runs one attention layer of a backend, with its own KV memory, built for one geometry.

    Slots are token slots: page x page_size + offset. `write` and `read` take KV in its stored form,
    ``[slots, kv_heads, head_dim]`` in kv_dtype. With fp8 KV the layer's scales are `SCALES`.
    """

    @property
    def capturable(self) -> Capturable:
        """Kinds of batches for which the backend declares support for full CUDA graphs."""

    @property
    def rounds_queries(self) -> bool:
        """True if the engine rounds queries to e4m3 with scale 1 before the kernel runs, as engines do with fp8 KV."""

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write KV directly into the layer's memory, without running the backend. slots: int64."""

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of k and v at these slots. slots: int64."""

    def forward(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Prepare and run a step eagerly.

        Args:
            q, k, v: rows of the step, ``[num_rows, heads, head_dim]``; padding rows are NaN.

        Returns:
            The layer's output ``[num_rows, heads, head_dim]``.
        """

    def capture(self, rows_each: int, requests: int) -> Any:
        """Capture the layer for batches of this size, as the engine does at startup. The output is not checked.

        Args:
            rows_each: rows per request.
            requests: number of requests, padding included.

        Returns:
            The graph to pass to `replay`.
        """

    def replay(self, graph: Any, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Prepare a step for a captured graph and replay the graph. A padded step must have the graph's size."""


@dataclass(frozen=True)
class EngineCapabilities:
    """Describes the features of a backend, which decide which items it runs, and holds a function that opens it.

    Attributes:
        open: builds a driver with a pool of the given number of pages; raises `Refused` with the engine's reasons.
        device: torch device.
        page_sizes: unit of the supported page sizes, in tokens: every multiple of it is supported.
        dtypes: dtypes of queries. If float32 is absent, float32 items run in float16 or bfloat16.
        modes: kinds of forwards that the engine has, as values of `Mode`.
        trees: True if the draft of a verify step may be a tree.
        slow: True if an interpreter runs the kernels; the largest inputs are then skipped.
    """

    open: Callable[[Geometry, int], Driver]
    device: str
    page_sizes: int = 16
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    modes: tuple[str, ...] = ("extend", "decode", "verify")
    trees: bool = False
    slow: bool = False

    def fit(self, attention: AttentionShape) -> AttentionShape:
        """Return the shape with the page size rounded up to a supported one.

        Unsupported float32 becomes float16, or bfloat16 if float16 is unsupported too.
        """
        exact = attention.q_dtype == "float32" and "float32" not in self.dtypes
        half = "float16" if "float16" in self.dtypes else "bfloat16"
        size = -(-attention.page_size // self.page_sizes) * self.page_sizes
        fitted = replace(attention, page_size=size)
        return replace(fitted, q_dtype=half, kv_dtype=half) if exact else fitted
