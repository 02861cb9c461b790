"""Interface between a hybrid model's layers and the loop."""

from __future__ import annotations

from typing import Protocol

import torch

from ..attention import AttentionStep


class StateRun(Protocol):
    """Computes convolutions and recurrences of every layer with state in one forward.

    A model passes the projections of its rows and reads the results. It never sees a slot, a length or the kind of a
    forward.
    """

    def convolve(self, layer: int, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Apply the short causal convolution of a layer, with SiLU if the layer's `StateShape` has it.

        Args:
            layer: layer with state, from 0.
            x: ``[rows, conv_channels]`` in the model's dtype, contiguous.
            weight: ``[conv_channels, conv_kernel]``; the last tap belongs to the row itself.
            bias: ``[conv_channels]`` or None.

        Returns:
            ``[rows, conv_channels]`` in x's dtype.
        """

    def recur(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> torch.Tensor:
        """Update the state of a layer by every row, and read it with the row's query.

        Args:
            layer: layer with state, from 0.
            q, k: ``[rows, num_key_heads, key_dim]`` in the model's dtype, contiguous. q is scaled; a delta rule's q
                and k are unit vectors.
            v: ``[rows, num_heads, value_dim]`` in the model's dtype, contiguous.
            log_decay: at most 0, in `StateShape.compute_dtype`: ``[rows, num_heads]``, ``[rows, num_heads, key_dim]``
                with a decay per key, or ``[num_heads]`` with a constant decay.
            beta: write strength of a delta rule, ``[rows, num_heads]`` in `StateShape.compute_dtype`; else None.

        Returns:
            ``[rows, num_heads, value_dim]`` in v's dtype.
        """


class StateStep(AttentionStep, StateRun, Protocol):
    """Computes attention, convolutions and recurrences of one forward of a hybrid model.

    The engine binds it to a batch, slots and backends. `layer` counts attention layers in `attend`, and layers with
    state in the other two methods. A decoder layer with attention and state has one index of each kind.
    """
