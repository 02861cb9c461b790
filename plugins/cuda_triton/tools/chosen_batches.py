"""Random batches of layers with chosen keys in every mode, with outputs and log-sum-exps in float64.

Each row's list is drawn from the keys that the row would see without lists. Lists have -1 between their keys. Entries
after the count, and lists of rows after the last request, hold numbers that no pool has.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draftmark import AttentionShape, Form, Mode
from draftmark.batch import Chosen

from .latent_batches import Problem, Sizes, draw

STALE = (-1, 2**31 - 1, -(2**31), 2**30)
"""Entries that a backend must not read."""
SIZES = Sizes()


@dataclass
class ChosenProblem(Problem):
    """Holds one forward with the slots of each live row's list, without -1."""

    lists: list[list[int]] = field(default_factory=list)

    def expected(self, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of the live rows in float64 on a device, each over the keys of the row's list."""
        a = self.geometry.attention
        (k, v), sinks = self.stored(device), self.cache.sinks
        scale = a.head_dim**-0.5 if a.softmax_scale is None else a.softmax_scale
        queries = self.q.to(device).double().view(-1, a.num_kv_heads, a.group_size, a.head_dim)
        outs, lses = [], []
        for q, slots in zip(queries, self.lists, strict=False):
            keys, values = k[slots].transpose(0, 1), v[slots].transpose(0, 1)  # [KV heads, keys, elements]
            scores = q @ keys.transpose(1, 2) * scale
            if a.logits_soft_cap:
                scores = a.logits_soft_cap * torch.tanh(scores / a.logits_soft_cap)
            total = lse = scores.logsumexp(-1)
            if sinks is not None:
                total = torch.logaddexp(lse, sinks.to(device).double().view(lse.shape))
            weights = (scores - total[..., None]).exp() if slots else scores
            outs.append((weights @ values).flatten(0, 1))
            lses.append(lse.flatten())
        return torch.stack(outs), torch.stack(lses)


def draw_chosen(
    shape: AttentionShape,
    mode: Mode,
    seed: int,
    device: str = "cpu",
    sizes: Sizes = SIZES,
    forms: tuple[Form, ...] = (),
    **limits: Any,
) -> ChosenProblem:
    """Draw a batch of a mode as `latent_batches.draw` does, and a list for each row. The first list has keys."""
    problem = draw(shape, mode, seed, device, sizes, forms, **limits)
    chance, width = random.Random(seed), shape.chosen_width
    lists: list[list[int]] = []
    for one in problem.requests:
        slots, visible = one.slots(shape.page_size), one.visible(-1)
        for seen in visible:
            keys = slots[seen].tolist()
            most = min(len(keys), width)
            count = chance.choice((0, 1, most, most, chance.randint(0, most)))
            lists.append(chance.sample(keys, count if lists else most))
    table = [[chance.choice(STALE) for _ in range(4)] * (width // 4 + 1) for _ in range(problem.batch.num_rows)]
    stored = torch.tensor(table)[:, :width].int()
    counts = torch.full((problem.batch.num_rows,), 2**31 - 1, dtype=torch.int32)
    for row, keys in enumerate(lists):
        holes = chance.randint(0, min(width - len(keys), 5))
        entries = keys + [-1] * holes
        chance.shuffle(entries)
        counts[row] = len(entries)
        stored[row, : len(entries)] = torch.tensor(entries, dtype=torch.int32)
    chosen = Chosen(stored.to(device), counts.to(device))
    fields = vars(problem) | {"batch": replace(problem.batch, chosen=chosen)}
    return ChosenProblem(**fields, lists=lists)
