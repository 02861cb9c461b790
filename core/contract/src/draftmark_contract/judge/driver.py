"""How the common questions reach a backend: one opened attention layer, driven as its engine's runner drives it.

An engine implements `Driver` and gives a `EngineCapabilities`; `questions` makes the items of it.
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
"""Of k and v where KV is fp8: stored value times scale is the real one, as in `harness.tensors`."""


class Capturable(IntEnum):
    """Which batches the backend declares that a full graph may hold."""

    NONE = 0
    ONE_ROW = 1
    """Batches of one row a request."""
    UNIFORM = 2
    """Batches in which each request has as many rows."""
    ANY = 3


class Driver(Protocol):
    """One attention layer of a backend with its KV memory, built for a geometry.

    Slots are token slots, page · page_size + offset; KV is passed as it is stored (``[slots, kv_heads, head_dim]`` in
    kv_dtype); the layer's scales of fp8 are `SCALES`.
    """

    @property
    def capturable(self) -> Capturable:
        """What the backend itself declares."""

    @property
    def rounds_queries(self) -> bool:
        """Whether the engine gives its kernel the queries in e4m3, with a scale of 1, as engines do where KV is fp8."""

    def write(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put KV into the layer's memory, past the backend. slots: int64."""

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What lies at these slots: k and v, copies."""

    def forward(self, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Prepare and run a step eagerly.

        Args:
            q, k, v: rows of the step, ``[num_rows, heads, head_dim]``; those of nobody are NaN.

        Returns:
            The layer's output ``[num_rows, heads, head_dim]``.
        """

    def capture(self, rows_each: int, requests: int) -> Any:
        """Capture the layer for batches of this size, as the engine does at its start. No result is looked at.

        Returns:
            What `replay` takes.
        """

    def replay(self, graph: Any, step: Step, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Prepare a step as the engine does for a captured one, and replay; with padding it has the graph's size."""


@dataclass(frozen=True)
class EngineCapabilities:
    """What a backend brings to the common questions.

    Attributes:
        open: builds a driver with a pool of so many pages; raises `NotServed` with the predicates' reasons.
        device: torch device.
        page_sizes: the step that pages are multiples of.
        dtypes: of queries; where float32 is none of them, float16 takes its place.
        modes: forwards that the engine has, by the names of `Mode`.
        trees: whether a verify tail may be a tree.
        slow: an interpreter runs the kernels, so the largest inputs are left to a device.
    """

    open: Callable[[Geometry, int], Driver]
    device: str
    page_sizes: int = 16
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    modes: tuple[str, ...] = ("extend", "decode", "verify")
    trees: bool = False
    slow: bool = False

    def fit(self, attention: AttentionShape) -> AttentionShape:
        """The shape with the next page size that the backend serves, and the finest dtype where it is float32."""
        exact = attention.q_dtype == "float32" and "float32" not in self.dtypes
        size = -(-attention.page_size // self.page_sizes) * self.page_sizes
        fitted = replace(attention, page_size=size)
        return replace(fitted, q_dtype="float16", kv_dtype="float16") if exact else fitted
