"""`kernels_sm90.pipeline.KvPipeline` over NumPy tiles, for partitions that run in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Stages:
    """Holds the tile (NumPy) or the barrier (a name) of each pipeline stage."""

    each: list[Any]

    def index(self, slot: Any) -> Any:
        """Return the tile or barrier of one stage; the tile is no copy, so writes change the pipeline."""
        return self.each[slot]


def make_numpy_pipeline(k: list[list[Any]], v: list[list[Any]]) -> Any:
    """Return a pipeline over the parts of K's and V's tiles, each a list of stages.

    Barriers are the names "k", "k empty", "v" and "v empty", each with its stage.
    """
    from draftmark_cuda_triton import kernels_sm90

    def half(name: str, parts: list[list[Any]]) -> Any:
        full, empty = (Stages([(one, slot) for slot in range(len(parts[0]))]) for one in (name, f"{name} empty"))
        return kernels_sm90.pipeline.TensorPipeline(tiles=tuple(map(Stages, parts)), full=full, empty=empty)

    return kernels_sm90.pipeline.KvPipeline(k=half("k", k), v=half("v", v))
