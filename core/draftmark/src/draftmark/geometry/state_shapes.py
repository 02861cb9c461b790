"""Shape of a layer with recurrent state. Integers only, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .shapes import Mode

STATE_MODES = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY, Mode.RAGGED_VERIFY)
"""Modes that a layer with state can run: those of a target model."""


class Recurrence(StrEnum):
    """Update of a layer's state S by one row with key k, value v, decay g and write strength β."""

    DELTA = "delta"
    """``S ← g·S + β·(v − g·S·k) ⊗ k``: Gated DeltaNet, KDA."""
    DECAY = "decay"
    """``S ← g·S + v ⊗ k``: Mamba2, Mamba1, Lightning."""
    NONE = "none"
    """No state, only a short convolution: LFM2."""


class Gate(StrEnum):
    """Shape of the decay g of one row."""

    HEAD = "head"
    """One number per head."""
    KEY = "key"
    """One number per head and key element."""
    CONSTANT = "constant"
    """One number per head, the same in every row."""


@dataclass(frozen=True)
class StateShape:
    """Shape of one layer with recurrent state, per tensor-parallel rank.

    A layer without recurrence (`Recurrence.NONE`) has 0 heads, key heads, key_dim and value_dim.

    Attributes:
        recurrence: update of the state.
        gate: shape of the decay; ignored by `Recurrence.NONE`.
        num_heads: heads of the state, of v and of the output; a multiple of num_key_heads.
        num_key_heads: heads of q and k. Head h reads key head ``h // (num_heads // num_key_heads)``.
        key_dim, value_dim: elements of a key and of a value of one head.
        conv_channels: channels of the short convolution; 0 for a layer without one.
        conv_kernel: taps of the convolution, the row's own included; 0 for a layer without one.
        dtype: torch dtype name of the activations q, k, v, x and of the outputs.
        state_dtype: torch dtype name of the stored state.
        conv_dtype: torch dtype name of the stored window.
        conv_silu: the convolution applies SiLU to its output; False for LFM2.
        round_prompts: EXTEND may round the operands of its matrix products to `dtype`, with sums in float32, as the
            prompt kernels of FLA, vLLM and SGLang do. By default every mode computes in `compute_dtype`.
    """

    recurrence: Recurrence
    gate: Gate
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_kernel: int
    dtype: str
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    conv_silu: bool = True
    round_prompts: bool = False

    @property
    def compute_dtype(self) -> str:
        """Torch dtype name of decays, β and the inner arithmetic: float64 for float64 activations, else float32."""
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def heads_per_key(self) -> int:
        """Number of heads that share one key head; 1 for a layer without recurrence."""
        return self.num_heads // self.num_key_heads if self.num_key_heads else 1
