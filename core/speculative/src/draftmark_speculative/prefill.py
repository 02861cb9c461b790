"""Prefill: one ragged forward over chunks of prompts, and the first token of every prompt that ends with it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from draftmark.runtime import HostLengths, ragged, to_device

from .drafts import Drafting
from .layers import AttentionLayers
from .models import CausalLM
from .request import Request
from .sampling import Sampling
from .scheduler import by_row
from .state import DeviceState

Chunk = tuple[Request, int]
"""A request, and how many of its tokens to store."""


class Prefill:
    """Runs EXTEND, and then what the drafting makes of it. Never captured.

    It reads no device memory on the host: the first tokens stay on the device, where the next round finds them.
    """

    def __init__(
        self,
        model: CausalLM,
        layers: AttentionLayers,
        state: DeviceState,
        sampling: Sampling,
        drafting: Drafting,
    ) -> None:
        self._model, self._layers, self._state = model, layers, state
        self._sampling, self._drafting = sampling, drafting

    def run(self, chunks: Sequence[Chunk], host: HostLengths) -> tuple[list[Request], torch.Tensor]:
        """Store the chunks' tokens and advance the lengths, device half.

        Returns:
            The requests whose tokens are all stored now, and the token that follows each: int64 ``[n]``, on the device.
        """
        state, device = self._state, self._state.device
        counts = tuple(count for _, count in chunks)
        rows = to_device(by_row([request for request, _ in chunks]), device)
        prefix_lens, table = state.lengths.device.index_select(0, rows), state.page_table.index_select(0, rows)
        batch = ragged(self._layers.geometry, prefix_lens, table, counts, host)
        ends = [
            (request, end - 1)
            for (request, n), end in zip(chunks, accumulate(counts), strict=True)
            if request.computed + n == len(request.tokens)
        ]
        ended = [request for request, _ in ends]
        last = to_device([row for _, row in ends], device)
        self._layers.plan(batch)
        self._layers.begin(batch)
        logits, features = self._model.forward_features(
            to_device(_tokens(chunks, 0), device), batch.positions, self._layers, self._drafting.taps, last
        )
        requests = to_device([request.id for request in ended], device)
        chosen = self._sampling.choose(logits, requests, batch.positions.index_select(0, last))
        ended_rows = to_device(by_row(ended), device)
        state.pending.index_copy_(0, ended_rows, chosen)
        if features is not None:
            following = to_device(_tokens(chunks, 1), device).index_copy_(0, last, chosen)
            self._drafting.extend(batch, features, following, ended_rows, last)
        state.lengths.advance(rows, to_device(counts, device))
        return ended, chosen


def _tokens(chunks: Sequence[Chunk], shift: int) -> list[int]:
    """The chunks' tokens, or those `shift` positions behind them; 0 where there is none yet."""
    found: list[int] = []
    for request, count in chunks:
        first = request.computed + shift
        part = request.tokens[first : first + count]
        found += part + [0] * (count - len(part))
    return found
