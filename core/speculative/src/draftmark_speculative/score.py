"""The logits of a given text, through a backend: one prefill, nothing generated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from draftmark.batch import ragged
from draftmark.lengths import Exact
from draftmark.registry import load

from .config import EngineConfig
from .layers import AttentionLayers, Pages, geometries_of
from .models import CausalLM


@torch.inference_mode()
def score(model: CausalLM, token_ids: Sequence[int], config: EngineConfig) -> torch.Tensor:
    """Logits that follow each token of a text.

    Args:
        config: its backend and page size are used; drafts, graphs and sampling are not.

    Returns:
        float32 ``[len(token_ids), vocab_size]``.
    """
    count, loaded = len(token_ids), load(config.backend)
    alone = replace(
        config, speculate=None, graph=False, overlap=False, max_num_reqs=1, num_pages=None, max_context_len=count,
        max_extend_tokens=count,
    )  # fmt: skip
    geometries = geometries_of(model, loaded, alone)
    pages = Pages.plan(loaded, geometries, alone)
    layers = AttentionLayers(model, loaded, alone, geometries, pages)
    table = torch.arange(pages.null, pages.total, dtype=torch.int32, device=model.device)
    empty = torch.zeros(1, dtype=torch.int32, device=model.device)
    batch = ragged(layers.geometry, empty, table[None, : layers.geometry.max_pages_per_req], (count,), Exact((0,)))
    layers.plan(batch)
    layers.begin(batch)
    return model.forward(torch.tensor(token_ids, device=model.device), batch.positions, layers)
