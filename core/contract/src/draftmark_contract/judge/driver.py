"""Interface between the common items and a backend: one opened attention layer that runs steps as its engine does.

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
    """Batches for which the backend declares support for full CUDA graphs."""

    NONE = 0
    ONE_ROW = 1
    """Batches with one row per request."""
    UNIFORM = 2
    """Batches in which every request has an equal number of rows."""
    ANY = 3


class Driver(Protocol):
    """Attention layer of a backend with its KV memory, built for a geometry.

    Slots are token slots: page x page_size + offset. `write` and `read` take KV in its stored form,
    ``[slots, kv_heads, head_dim]`` in kv_dtype. With fp8 KV the layer's scales are `SCALES`.
    """

    @property
    def capturable(self) -> Capturable:
        """Batches that the backend declares capturable."""

    @property
    def rounds_queries(self) -> bool:
        """True if the engine rounds queries to e4m3 with scale 1 before its kernel runs, as engines do with fp8 KV."""

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write KV straight into the layer's memory, without the backend. slots: int64."""

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
        """Capture the layer for batches of this size, as the engine does at startup. The output is ignored.

        Args:
            rows_each: rows per request.
            requests: number of requests, padding included.

        Returns:
            The graph to pass to `replay`.
        """

    def replay(self, graph: Any, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Prepare a step for a captured graph and replay the graph. With padding the step has the graph's size."""


@dataclass(frozen=True)
class EngineCapabilities:
    """Features of a backend that decide which common items it runs, and a function that opens it.

    Attributes:
        open: builds a driver with a pool of the given number of pages; raises `NotServed` with the engine's reasons.
        device: torch device.
        page_sizes: supported page sizes are the multiples of this number, in tokens.
        dtypes: dtypes of queries. Items in float32 run in float16 if float32 is absent.
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
        """Return the shape with the page size rounded up to a supported one, and float16 in place of absent float32."""
        exact = attention.q_dtype == "float32" and "float32" not in self.dtypes
        size = -(-attention.page_size // self.page_sizes) * self.page_sizes
        fitted = replace(attention, page_size=size)
        return replace(fitted, q_dtype="float16", kv_dtype="float16") if exact else fitted
