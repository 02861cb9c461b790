"""Specification of a recurrent state over a committed prefix and a masked tail, in plain torch.

`step` is one row. `masked` computes all rows of a tree from the committed state, without a state per row: a row's terms
are its ancestors, as in attention. In exact arithmetic both are equal. With G_t the product of the decays of row t
and its ancestors::

    u_t = β_t (v_t − G_t S_0 k_t − Σ_{ancestors j ≠ t} u_j ((G_t/G_j) k_j · k_t))     one triangular solve
    o_t = G_t S_0 q_t + Σ_{ancestors j} u_j ((G_t/G_j) k_j · q_t)

Without a delta rule u_t = v_t. G_t/G_j <= 1 for an ancestor, so no term overflows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftmark import Gate, StateShape


@dataclass(frozen=True)
class Rows:
    """Rows of R requests, T each, in the compute dtype, with key heads repeated for each head.

    Attributes:
        q, k: ``[R, H, T, key_dim]``.
        v: ``[R, H, T, value_dim]``.
        log_decay: ``[R, H, T, 1]``, or ``[R, H, T, key_dim]`` with a decay per key element.
        beta: ``[R, H, T, 1]``, or None for a layer without the delta rule.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    log_decay: torch.Tensor
    beta: torch.Tensor | None

    def at(self, rows: slice) -> Rows:
        """Return some of the T rows."""
        q, k, v, decay = (one[:, :, rows] for one in (self.q, self.k, self.v, self.log_decay))
        return Rows(q, k, v, decay, None if self.beta is None else self.beta[:, :, rows])


def rows_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor | None,
    shape: StateShape,
) -> Rows:
    """Return `Rows` of tensors ``[R, T, heads, …]``; a constant decay has ``[heads]``."""
    compute, repeat = getattr(torch, shape.compute_dtype), shape.heads_per_key
    q, k = (one.to(compute).repeat_interleave(repeat, 2).transpose(1, 2) for one in (q, k))
    v = v.to(compute).transpose(1, 2)
    if shape.gate is Gate.KEY:
        decay = log_decay.transpose(1, 2)
    elif shape.gate is Gate.HEAD:
        decay = log_decay.transpose(1, 2)[..., None]
    else:
        decay = log_decay[None, :, None, None].expand(*v.shape[:3], 1)
    return Rows(q, k, v, decay, None if beta is None else beta.transpose(1, 2)[..., None])


def step(state: torch.Tensor, row: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the state after one row, and its output.

    Args:
        state: ``[R, H, value_dim, key_dim]`` in the compute dtype, of the row's parent.
        row: rows with T = 1.

    Returns:
        The new state, and the output ``[R, H, 1, value_dim]``.
    """
    state = state * row.log_decay.exp()
    written = row.v
    if row.beta is not None:
        written = row.beta * (row.v - row.k @ state.transpose(-1, -2))
    state = state + written.transpose(-1, -2) @ row.k
    return state, row.q @ state.transpose(-1, -2)


def masked(state: torch.Tensor, rows: Rows, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of all rows, and the state after the last row.

    Args:
        state: committed states ``[R, H, value_dim, key_dim]`` in the compute dtype.
        rows: T rows of each request.
        seen: bool ``[R, T, T]``; [r, t, j] is True when row j is row t or an ancestor, so j <= t.

    Returns:
        The outputs ``[R, H, T, value_dim]``, and the state after the last row and its ancestors.
    """
    seen = seen[:, None]
    total = seen.to(state.dtype) @ rows.log_decay  # log G_t
    decay, written = total.exp(), rows.v
    if rows.beta is not None:
        among_keys = _products(rows.k, rows.k, total, seen).tril(-1)
        system = torch.eye(seen.shape[-1], dtype=state.dtype, device=state.device) + rows.beta * among_keys
        right = rows.beta * (rows.v - (rows.k * decay) @ state.transpose(-1, -2))
        written = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    out = (rows.q * decay) @ state.transpose(-1, -2) + _products(rows.q, rows.k, total, seen) @ written
    last = torch.where(seen[:, :, -1, :, None], total[:, :, -1:] - total, -torch.inf).exp()
    return out, state * decay[:, :, -1:] + written.transpose(-1, -2) @ (rows.k * last)


def _products(left: torch.Tensor, k: torch.Tensor, total: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return ``(G_t/G_j) k_j · left_t`` for each row t and visible row j, ``[R, H, T, T]``; 0 elsewhere."""
    if total.shape[-1] == 1:
        ratio = torch.where(seen, total - total.transpose(-1, -2), -torch.inf).exp()
        return left @ k.transpose(-1, -2) * ratio
    found = []
    for t in range(k.shape[2]):  # row by row: all rows at once need T · T · key_dim numbers per head
        ratio = torch.where(seen[:, :, t, :, None], total[:, :, t : t + 1] - total, -torch.inf).exp()
        found.append(((k * ratio) @ left[:, :, t, :, None])[..., 0])
    return torch.stack(found, 2)
