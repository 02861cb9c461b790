"""One request's attention, convolutions and recurrences, token by token in the model's dtype.

An oracle for the token mixers: it shares no code with draftmark's state backends.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from draftmark import Gate, Recurrence, StateShape
from draftmark_speculative.models import LayerAttention


class PlainRun:
    """`Run` and `StateRun` of one request. Every forward appends its rows to the request."""

    def __init__(self, shapes: Sequence[StateShape]) -> None:
        self._shapes = shapes
        self._windows: dict[int, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._stored: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(
        self,
        layer: int,
        called: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend to all earlier rows of the request."""
        v = k[..., : called.value_width] if v is None else v
        if layer in self._stored:
            k, v = (torch.cat(pair) for pair in zip(self._stored[layer], (k, v), strict=True))
        self._stored[layer] = k, v
        outputs = []
        for row, query in enumerate(q):
            last = len(k) - len(q) + row
            first = 0 if called.window_left < 0 else max(0, last - called.window_left)
            group = called.num_qo_heads // called.num_kv_heads
            keys, values = (one[first : last + 1].repeat_interleave(group, 1) for one in (k, v))
            weights = (torch.einsum("hd,khd->hk", query, keys) * called.softmax_scale).softmax(-1)
            outputs.append(torch.einsum("hk,khd->hd", weights, values))
        return torch.stack(outputs)

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Convolve each row with the rows before it; zeros stand before the first."""
        taps = weight.shape[1]
        before = self._windows.get(layer, x.new_zeros(taps - 1, x.shape[1]))
        rows = torch.cat((before, x))
        self._windows[layer] = rows[len(x) :]
        out = torch.stack([(rows[row : row + taps] * weight.T).sum(0) for row in range(len(x))])
        out = out if bias is None else out + bias
        return F.silu(out) if self._shapes[layer].conv_silu else out

    def recur(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Update the state by one row after the other."""
        shape = self._shapes[layer]
        q, k = (one.repeat_interleave(shape.heads_per_key, 1) for one in (q, k))
        state = self._states.get(layer, v.new_zeros(shape.num_heads, shape.value_dim, shape.key_dim))
        outputs = []
        for row in range(len(q)):
            decay = (log_decay if shape.gate is Gate.CONSTANT else log_decay[row]).exp()
            state = state * decay.reshape(shape.num_heads, 1, -1)
            value = v[row]
            if shape.recurrence is Recurrence.DELTA:
                assert beta is not None
                value = beta[row][:, None] * (value - torch.einsum("hvk,hk->hv", state, k[row]))
            state = state + torch.einsum("hv,hk->hvk", value, k[row])
            outputs.append(torch.einsum("hvk,hk->hv", state, q[row]))
        self._states[layer] = state
        return torch.stack(outputs)


class PlainStep:
    """`StateStep` over a `PlainRun`."""

    def __init__(self, run: PlainRun, layers: Sequence[LayerAttention]) -> None:
        self._run, self._layers = run, layers
        self.convolve, self.recur = run.convolve, run.recur

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """Attend to all earlier rows of the request."""
        return self._run(layer, self._layers[layer], q, k, v)
