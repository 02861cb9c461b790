"""Mutants that the checks of `pools` kill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from draftmark.runtime import ForwardBatch, KVCache

from ..designs.layouts import READS_NO_TABLE
from ..mutant import Mutant, around


def _wrapped(backend: Any) -> None:
    """Wrap page · stride at 2**31 if a page of all layers is contiguous; other pools are right."""

    def attend(original: Any, q: Tensor, cache: KVCache, batch: ForwardBatch, out: Tensor) -> None:
        stride = cache.k.stride(0)
        if stride > cache.k[0].numel() * 2:
            offset = (batch.page_table.long() * stride).to(torch.int32)
            batch = replace(batch, page_table=offset.clamp(min=0) // stride)
        original(q, cache, batch, out)

    around(backend, "attend", attend)


MUTANTS = (
    Mutant("G04", "Wraps page offsets at 2**31 in a pool with all layers of a page adjacent", "vllm#47671",
           patch=_wrapped, **READS_NO_TABLE),
)  # fmt: skip
KILLER = dict.fromkeys(("G04",), "pools.may_be_packed_and_far")
