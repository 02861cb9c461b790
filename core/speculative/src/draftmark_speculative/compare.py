"""Measurements for `agreement`: texts against baselines, and logits against a float32 copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftmark import load
from draftmark.runtime import Exact, ragged

from .agreement import CAP, Agreement, LogitError
from .config import EngineConfig
from .layers import open_layers
from .models import CausalLM

CONTENDERS = 10
"""Number of best logits compared a row. Logits far below the best have twice the error and decide no choice."""
ROWS = 512
"""Number of last rows of a text with compared logits. A longer output is compared in full."""

Texts = Sequence[Sequence[int]]
"""Token ids of each prompt."""


def compare(
    model: CausalLM, prompts: Texts, texts: Texts, baselines: Mapping[str, Texts], config: EngineConfig | None = None
) -> Agreement:
    """Compare decoded texts with baselines, and in half precision with a float32 copy of the model.

    Args:
        texts: decoded tokens without the prompts; at least one token each.
        baselines: expected texts, by name of the baseline.
        config: configuration of the engine that decoded. Sampled texts must equal their baselines, because a sample
            need not lie near the best token. None means that texts are greedy and the backend's logits are not
            measured.
    """
    differences = {
        (prompt, name): at
        for name, others in baselines.items()
        for prompt, (text, other) in enumerate(zip(texts, others, strict=True))
        if (at := first_difference(text, other)) is not None
    }
    if model.dtype is torch.float32:
        return Agreement(differences)
    seen = _Measurement(model, config)
    for number, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        below = seen.read(prompt, text)
        if config is not None and not config.sampling.greedy:
            continue
        lowest = below.gather(1, torch.tensor(text, device=below.device)[:, None])[:, 0].max(0)
        seen.choices[number] = int(lowest.indices), float(lowest.values)
        for name, others in baselines.items():
            at, other = differences.get((number, name)), others[number]
            if at is not None and at < min(len(text), len(other)):
                seen.gaps[number, name] = float(below[at, [text[at], other[at]]].max())
    return seen.agreement(differences)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Return the index of the first difference: the shorter length if one continues the other, None if equal."""
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


@dataclass
class _Measurement:
    """Accumulates the rounding errors of texts, one text after another."""

    model: CausalLM
    config: EngineConfig | None
    own: list[torch.Tensor] = field(default_factory=list)
    backend: list[torch.Tensor] = field(default_factory=list)
    spread: list[torch.Tensor] = field(default_factory=list)
    gaps: dict[tuple[int, str], float] = field(default_factory=dict)
    choices: dict[int, tuple[int, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # transformers' own float() rejects a model from GGUF, although its weights are unpacked.
        self._exact = torch.nn.Module.float(copy.deepcopy(self.model.hf))

    @torch.inference_mode()
    def read(self, prompt: Sequence[int], text: Sequence[int]) -> torch.Tensor:
        """Measure one text and return how far each logit lies below the best of its row.

        Returns:
            float32 ``[len(text), vocab_size]``, on the host: some devices lack the operations for statistics.
        """
        ids = [*prompt, *text[:-1]]
        rows = min(len(ids), max(len(text), ROWS))
        want = _logits(self._exact, ids, rows)
        best = want.topk(min(CONTENDERS, want.shape[1])).indices
        self.own.append((_logits(self.model.hf, ids, rows) - want).gather(1, best))
        if self.config is not None:
            self.backend.append((score(self.model, ids, self.config, rows).cpu() - want).gather(1, best))
        self.spread.append(want.std(1))
        chosen = want[-len(text) :]
        return chosen.max(1, keepdim=True).values - chosen

    def agreement(self, differences: Mapping[tuple[int, str], int]) -> Agreement:
        """Return the agreement of all texts read so far."""
        cap = CAP * torch.finfo(self.model.dtype).eps * float(torch.cat(self.spread).mean())
        backend = _error(self.backend) if self.backend else None
        name = str(self.model.dtype).removeprefix("torch.")
        return Agreement(differences, name, _error(self.own), cap, backend, self.gaps, self.choices)


def _error(differences: Sequence[torch.Tensor]) -> LogitError:
    every = torch.cat([one.flatten() for one in differences])
    return LogitError(float(every.abs().max()), float(every.square().mean().sqrt()))


def _logits(hf: Any, token_ids: Sequence[int], rows: int) -> torch.Tensor:
    """Return the last rows' logits by transformers' own attention, float32 ``[rows, vocab_size]``, on the host."""
    ids = torch.tensor([token_ids], device=hf.device)
    logits: torch.Tensor = hf(ids, use_cache=False, logits_to_keep=rows).logits[0].float().cpu()
    return logits


def score(model: CausalLM, token_ids: Sequence[int], config: EngineConfig, rows: int) -> torch.Tensor:
    """Return the logits after each of a text's last `rows` tokens, from one prefill on a backend.

    Args:
        config: supplies the backend and the page size; its drafts, graphs and sampling are not used.

    Returns:
        float32 ``[rows, vocab_size]``.
    """
    count = len(token_ids)
    single = replace(
        config, speculate=None, graph=False, overlap=False, max_num_reqs=1, num_pages=None, prefix_cache=False,
        state_slots=None, max_context_len=count, max_extend_tokens=count,
    )  # fmt: skip
    (layers,) = open_layers(model, None, load(config.backend), single)
    table = torch.arange(layers.pages.null, layers.pages.total, dtype=torch.int32, device=model.device)
    empty = torch.zeros(1, dtype=torch.int32, device=model.device)
    slots = None if layers.states is None else torch.full_like(empty, layers.states.slots.take(0))
    table = table[None, : layers.geometry.max_pages_per_req]
    batch = ragged(layers.geometry, empty, table, (count,), Exact((0,)), state_slots=slots)
    layers.plan(batch)
    layers.begin(batch)
    last = torch.arange(count - rows, count, device=model.device)
    return model.forward(torch.tensor(token_ids, device=model.device), batch.positions, layers, last)
