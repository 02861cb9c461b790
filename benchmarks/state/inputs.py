"""Random inputs of a case, and its outputs in float64, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from draftmark import Gate, Recurrence

from .cases import Case

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PREFIX_LEN = 1000
"""Committed tokens of each request."""


@dataclass
class Inputs:
    """Inputs of one layer. Rows are grouped by request.

    The decays and strengths also exist as the raw values that kernels with fused gates take. With A_log and dt_bias of
    0, ``log_decay = -softplus(raw_decay)`` and ``beta = sigmoid(raw_beta)``. For Mamba2 ``v = dt · x`` and
    ``log_decay = -dt``.

    Attributes:
        q, k, v: bfloat16 ``[rows, heads, elements]``.
        log_decay, raw_decay: float32 ``[rows, heads]``, or ``[rows, heads, key_dim]`` for a decay per key element.
        beta, raw_beta: float32 ``[rows, heads]``; None without a delta rule.
        x, dt: Mamba2's input and step: bfloat16 like v and float32 ``[rows, heads]``; None for other layers.
        state: ``[requests + 1, heads, value_dim, key_dim]``; slot 0 belongs to no request.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    raw_decay: torch.Tensor
    beta: torch.Tensor | None
    raw_beta: torch.Tensor | None
    x: torch.Tensor | None
    dt: torch.Tensor | None
    state: torch.Tensor

    @cached_property
    def packed(self) -> torch.Tensor:
        """Return q, k and v of each row side by side, as a convolution leaves them."""
        return torch.cat([part.flatten(1) for part in (self.q, self.k, self.v)], 1)


def draw(case: Case, seed: int) -> Inputs:
    """Draw the inputs of one layer."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    s, rows = case.layer.shape, sum(case.rows)
    delta = s.recurrence is Recurrence.DELTA
    q, k = (normal(rows, s.num_key_heads, s.key_dim) for _ in range(2))
    q, k = (torch.nn.functional.normalize(one, dim=-1) if delta else one * s.key_dim**-0.5 for one in (q, k))
    raw_decay = normal(rows, s.num_heads, *[s.key_dim] * (s.gate is Gate.KEY)) - 3
    dt = torch.nn.functional.softplus(raw_decay)
    raw_beta = normal(rows, s.num_heads) if delta else None
    x = normal(rows, s.num_heads, s.value_dim).bfloat16()
    v = x if delta else (x.float() * dt[..., None]).bfloat16()
    return Inputs(
        (q * (s.key_dim**-0.5 if delta else 1)).bfloat16(), k.bfloat16(), v, -dt, raw_decay,
        None if raw_beta is None else raw_beta.sigmoid(), raw_beta, None if delta else x, None if delta else dt,
        normal(case.requests + 1, s.num_heads, s.value_dim, s.key_dim).to(getattr(torch, s.state_dtype)),
    )  # fmt: skip


@dataclass
class Expected:
    """Outputs ``[rows, heads, value_dim]`` of some requests in float64, and their states after the accepted rows.

    Attributes:
        requests: the requests that are compared, the first and the last.
        outs, states: one tensor for each of these requests.
    """

    requests: list[int]
    outs: list[torch.Tensor]
    states: list[torch.Tensor]

    def error(self, case: Case, out: torch.Tensor, states: torch.Tensor | None) -> float:
        """Return the largest relative error by norm, of the outputs and, if given, of the slots ``[requests + 1, …]``.

        NaN in an output makes it NaN.
        """
        found = []
        for request, expected, after in zip(self.requests, self.outs, self.states, strict=True):
            start = sum(case.rows[:request])
            found.append((out[start : start + case.rows[request]].double() - expected).norm() / expected.norm())
            if states is not None:
                found.append((states[request + 1].double() - after).norm() / after.norm())
        worst = torch.stack(found)
        return float("nan") if worst.isnan().any() else float(worst.max())


def expected(case: Case, inputs: Inputs) -> Expected:
    """Compute the outputs of the first and the last request, row by row in float64."""
    requests = sorted({0, case.requests - 1})
    found = [_one(case, inputs, request) for request in requests]
    return Expected(requests, [out for out, _ in found], [state for _, state in found])


def _one(case: Case, inputs: Inputs, request: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a request's outputs, and its state after the accepted rows; a prompt accepts every row."""
    s, start, rows = case.layer.shape, sum(case.rows[:request]), case.rows[request]
    own = slice(start, start + rows)
    q, k = (one[own].double().repeat_interleave(s.heads_per_key, 1) for one in (inputs.q, inputs.k))
    v, decay = inputs.v[own].double(), inputs.log_decay[own].double().exp()
    decay = decay[:, :, None, :] if s.gate is Gate.KEY else decay[..., None, None]
    beta = None if inputs.beta is None else inputs.beta[own].double()
    parents = case.parents if case.mode == "tree" else [*range(-1, rows - 1)]
    first = inputs.state[request + 1].double()
    after: dict[int, torch.Tensor] = {-1: first}
    outs = torch.empty_like(v)
    kept = case.path[-1] if case.nodes else rows - 1
    for row, parent in enumerate(parents):
        state = after[parent] * decay[row]
        write = v[row]
        if beta is not None:
            write = beta[row][:, None] * (write - (state @ k[row][:, :, None])[..., 0])
        after[row] = state + write[:, :, None] * k[row][:, None, :]
        outs[row] = (after[row] @ q[row][:, :, None])[..., 0]
        if case.mode != "tree" and row - 1 != kept:
            del after[parent]
    return outs, after[kept]
