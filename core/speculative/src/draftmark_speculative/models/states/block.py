"""Common parts of all token mixers with state: their place in the model, their convolution, and their dtypes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.activations import ACT2FN

from draftmark import Gate, ModelError, Recurrence, StateShape

from .step import StateRun


class Heads(NamedTuple):
    """Heads of a recurrence, as `StateShape` names them."""

    num_heads: int = 0
    num_key_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0


class StateBlock(ABC):
    """Token mixer with state of one decoder layer, over the weights of its transformers module.

    The projections, norms and gates are the module's own. Only the convolution and the recurrence are replaced: they
    run in the forward's `StateRun`, which can take rejected rows back.

    Attributes:
        module: the transformers module.
        decoder_layer: index of its decoder layer.
        shape: heads, convolution and dtypes of the layer.
        returns_pair: the module returns a pair, as transformers' attention does; the second element is not read.

    Args:
        dtype: of the model's activations. The window stores them unrounded; a state is float32, or float64 with them.
    """

    recurrence: Recurrence
    gate = Gate.HEAD
    returns_pair = False

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        self.module = module
        self.decoder_layer = int(module.layer_idx)
        conv = self.convolution
        if conv is not None:
            self._check(conv)
        name = str(dtype).removeprefix("torch.")
        self.shape = StateShape(
            self.recurrence,
            self.gate,
            *self.heads(),
            conv_channels=0 if conv is None else conv.in_channels,
            conv_kernel=0 if conv is None else conv.kernel_size[0],
            dtype=name,
            state_dtype="float64" if name == "float64" else "float32",
            conv_dtype=name,
            conv_silu=self._silu(),
        )
        self._wide: torch.dtype = getattr(torch, self.shape.compute_dtype)

    @abstractmethod
    def __call__(self, hidden: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Mix the rows of all requests.

        Args:
            hidden: ``[rows, hidden_size]``.
            layer: index of the layer among the layers with state.

        Returns:
            ``[rows, hidden_size]``, without the residual.
        """

    @property
    def decodes_alike(self) -> bool:
        """True if the transformers module computes the same in a forward of one row over its cache."""
        return True

    @abstractmethod
    def heads(self) -> Heads:
        """Return the heads of the recurrence."""

    @property
    def convolution(self) -> nn.Conv1d | None:
        """Depthwise convolution of the module; None for a module without one."""
        conv: nn.Conv1d = self.module.conv1d
        return conv

    def convolve(self, x: torch.Tensor, step: StateRun, layer: int) -> torch.Tensor:
        """Return the rows' channels after the convolution: ``[rows, conv_channels]``."""
        conv = self.convolution
        assert conv is not None, "only a layer with a convolution calls it"
        return step.convolve(layer, x.contiguous(), conv.weight.squeeze(1), conv.bias)

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        """Convert to the dtype of decays, write strengths and inner arithmetic."""
        return x.to(self._wide)

    def _check(self, conv: nn.Conv1d) -> None:
        """Raise `ModelError` unless each channel is convolved with its own 2 or more adjacent taps."""
        taps, plain = conv.kernel_size[0], conv.stride == conv.dilation == (1,)
        if taps < 2 or not plain or not conv.groups == conv.in_channels == conv.out_channels:
            raise ModelError(
                f"its layer {self.decoder_layer} has a convolution of {taps} taps, {conv.in_channels} channels in "
                f"{conv.groups} groups, stride {conv.stride[0]} and dilation {conv.dilation[0]}, but draftmark serves "
                "2 or more adjacent taps of each channel by itself; use the config.json of the weights"
            )

    def _silu(self) -> bool:
        """Return True if the convolution applies SiLU, False if it applies nothing; raise `ModelError` otherwise."""
        if self.convolution is None:
            return True  # the default of `StateShape`; nothing reads it
        name = getattr(self.module, "activation", None)
        if name is None:
            return False
        if type(ACT2FN[name]) is not type(ACT2FN["silu"]):
            raise ModelError(
                f"its layer {self.decoder_layer} applies {name} after the short convolution, but draftmark serves "
                "silu; use a model with silu"
            )
        return True
