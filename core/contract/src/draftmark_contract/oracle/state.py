"""Recurrent state in float64: one request of one layer, row after row, each row from its parent's state.

This is the definition that a layer's masked form is compared with. A row t with parent p, decay g, key k, value v and
strength β leaves ``S_t = g S_p + u ⊗ k``, where ``u = β (v - δ g S_p k)``. Its output is ``S_t q``. δ is 1 for delta
rules and 0 for decay. Source: arXiv:2412.06464 (gated delta rule) and arXiv:2405.21060 (decay).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .history import NO_PARENT

ROUNDINGS, PER_ROW = 64, 8
"""Float32 roundings that a state may have suffered: a constant part, and a part for each row on its path."""
FLOAT32 = 2.0**-24
"""Unit roundoff of float32, in which kernels compute."""


class SequentialState:
    """Recurrent state and convolution window of one request in one layer.

    Every row is computed by itself, so its bits do not depend on other rows. `keep` commits one row's state.

    Args:
        state: ``[heads, value_dim, key_dim]``, the committed state; None for a layer with a convolution only.
        window: ``[channels, kernel - 1]``, the last committed inputs of the convolution, oldest first; None without
            a convolution.
        delta: True for a delta rule, False for decay.
        dtype: dtype of the arithmetic.

    Attributes:
        state, window: the committed ones.
        states, windows: those that each row of the last forward leaves.
        strain: float64 ``[heads, value_dim]`` for each of these rows: the largest norm over keys of any state up to
            this row. It scales the rounding errors of the row's state and output.
        roundings: bound on the roundings of each row's state, in units of `strain`.
    """

    def __init__(
        self,
        state: torch.Tensor | None,
        window: torch.Tensor | None,
        *,
        delta: bool,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.delta, self.dtype = delta, dtype
        self.state = None if state is None else state.to("cpu", dtype)
        self.window = None if window is None else window.to("cpu", dtype)
        self.states: list[torch.Tensor] = []
        self.windows: list[torch.Tensor] = []
        self.strain: list[torch.Tensor] = []
        self.roundings: list[float] = []

    def convolve(
        self,
        x: torch.Tensor,
        parents: Sequence[int],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        silu: bool = True,
    ) -> torch.Tensor:
        """Return the causal depthwise convolution of each row over itself and its ancestors, ``[rows, channels]``.

        Ancestors in the tail come first, then the committed window.

        Args:
            x: ``[rows, channels]``.
            parents: parent of each row, or `NO_PARENT` for the committed window.
            weight: ``[channels, kernel]``; the last tap belongs to the row itself.
            bias: ``[channels]`` or None.
            silu: True to apply ``x · sigmoid(x)`` to the result.
        """
        assert self.window is not None, "the layer has no convolution"
        x, weight = x.to("cpu", self.dtype), weight.to("cpu", self.dtype)
        self.windows, found = [], []
        for row, parent in enumerate(parents):
            before = self.window if parent == NO_PARENT else self.windows[parent]
            seen = torch.cat((before, x[row][:, None]), -1)
            total = (seen * weight).sum(-1)
            if bias is not None:
                total = total + bias.to("cpu", self.dtype)
            found.append(total * torch.sigmoid(total) if silu else total)
            self.windows.append(seen[:, 1:])
        return torch.stack(found) if found else x

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        parents: Sequence[int],
    ) -> torch.Tensor:
        """Return the output of each row, ``[rows, heads, value_dim]``.

        Head h reads key head ``h // (heads / key_heads)``.

        Args:
            q, k: ``[rows, key_heads, key_dim]``.
            v: ``[rows, heads, value_dim]``.
            log_decay: ``[rows, heads]``, or ``[rows, heads, key_dim]`` for a gate of each key.
            beta: ``[rows, heads]``; None for 1.
            parents: parent of each row, or `NO_PARENT` for the committed state.
        """
        assert self.state is not None, "the layer has no recurrence"
        group = v.shape[1] // k.shape[1]
        q, k = (one.to("cpu", self.dtype).repeat_interleave(group, 1) for one in (q, k))
        v, log_decay = v.to("cpu", self.dtype), log_decay.to("cpu", self.dtype)
        strengths = None if beta is None else beta.to("cpu", self.dtype)
        self.states, self.roundings, updates, found = [], [], [], []
        for row, parent in enumerate(parents):
            root = parent == NO_PARENT
            keys = k[row][:, None]
            decay = torch.exp(log_decay[row]).view(v.shape[1], 1, -1)
            faded = decay * (self.state if root else self.states[parent])
            u = v[row]
            if self.delta:
                u = u - (faded * keys).sum(-1)
            if strengths is not None:
                u = strengths[row][:, None] * u
            state = faded + u[..., None] * keys
            self.states.append(state)
            updates.append(u)
            found.append((state * q[row][:, None]).sum(-1))
            self.roundings.append(PER_ROW + (ROUNDINGS if root else self.roundings[parent]))
        if not found:
            return v
        pushed = torch.stack(updates).abs() * k.norm(dim=-1, keepdim=True)
        sizes = torch.maximum(torch.stack(self.states).norm(dim=-1), pushed).double()
        self.strain = list(torch.maximum(sizes, self.state.double().norm(dim=-1)).cummax(0).values)
        return torch.stack(found)

    def keep(self, row: int) -> None:
        """Make the state and the window that `row` of the last forward leaves the committed ones.

        `NO_PARENT` keeps the committed ones as they are.
        """
        if row == NO_PARENT:
            return
        if self.states:
            self.state = self.states[row]
        if self.windows:
            self.window = self.windows[row]
