"""Oracle of a layer with recurrent state: one row after another, in float64, with a state for every row."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class SequentialState:
    """Recurrent state and convolution window of one request.

    Args:
        state: ``[heads, value_dim, key_dim]``, the committed state.
        window: ``[channels, kernel - 1]``, the last committed inputs of the convolution, oldest first.
        delta: True for a delta rule, False for decay only.

    Attributes:
        state, window: the committed ones, float64.
        states, windows: those that each row of the last forward leaves.
    """

    def __init__(self, state: torch.Tensor, window: torch.Tensor, *, delta: bool) -> None:
        self.delta = delta
        self.state, self.window = state.double(), window.double()
        self.states: list[torch.Tensor] = []
        self.windows: list[torch.Tensor] = []

    def convolve(
        self, x: torch.Tensor, parents: Sequence[int], weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the causal convolution of each row over itself and its ancestors, after SiLU, ``[rows, channels]``.

        Args:
            x: ``[rows, channels]``. parents: parent of each row, -1 for the committed window.
            weight: ``[channels, kernel]``; the last tap belongs to the row itself. bias: ``[channels]`` or None.
        """
        self.windows, found = [], []
        for row, parent in enumerate(parents):
            before = self.window if parent < 0 else self.windows[parent]
            seen = torch.cat((before, x[row].double()[:, None]), -1)
            total = (seen * weight.double()).sum(-1)
            total = total if bias is None else total + bias.double()
            found.append(total * torch.sigmoid(total))
            self.windows.append(seen[:, 1:])
        return torch.stack(found)

    def recur(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
        parents: Sequence[int],
    ) -> torch.Tensor:
        """Return the output of each row, ``[rows, heads, value_dim]``. All tensors are float64.

        Args:
            q, k: ``[rows, key_heads, key_dim]``. v: ``[rows, heads, value_dim]``.
            log_decay: ``[rows, heads]``, or ``[rows, heads, key_dim]``. beta: ``[rows, heads]``; None for 1.
            parents: parent of each row, -1 for the committed state.
        """
        group = v.shape[1] // k.shape[1]
        self.states, found = [], []
        for row, parent in enumerate(parents):
            keys = k[row].repeat_interleave(group, 0)[:, None]
            decay = torch.exp(log_decay[row]).view(v.shape[1], 1, -1)
            faded = decay * (self.state if parent < 0 else self.states[parent])
            u = v[row] - (faded * keys).sum(-1) if self.delta else v[row]
            u = u if beta is None else beta[row][:, None] * u
            self.states.append(faded + u[..., None] * keys)
            found.append((self.states[-1] * q[row].repeat_interleave(group, 0)[:, None]).sum(-1))
        return torch.stack(found)

    def keep(self, row: int) -> None:
        """Make the state and the window that `row` of the last forward leaves the committed ones."""
        self.state, self.window = self.states[row], self.windows[row]
