"""Stand-in for SGLang's request and state pools: the same tensors in the same layout, on a CPU."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from draftmark_contract.judge.states.layer import Family, Layer

from ..probes.bare import member
from .stand_ins import Missing, StandIn

POISON = float("nan")
RESERVED = 1
"""Slots, and rows of the request table, in front of those of requests. SGLang keeps row 0 and slot 0 for padding."""


class StatePools:
    """Holds the states of one layer, as `req_to_token_pool` of SGLang's backends.

    Slots and scratch start with old contents. Scratch has one entry for each request of a batch and one more.

    Args:
        layer: the layer. drafts: rows of a verify. requests: most requests. tree: True if drafts are trees.
    """

    def __init__(self, layer: Layer, drafts: int, requests: int, tree: bool) -> None:
        shape, dtype = layer.shape, getattr(torch, layer.shape.dtype)
        self.size = requests
        self.short_conv_pool = StandIn(conv_state=None, intermediate_conv_state=None)
        self.ngram_pool = StandIn(context=None, intermediate_context=None)
        self.slots = torch.randperm(2 * requests, generator=torch.Generator().manual_seed(7))[:requests] + RESERVED
        slots = RESERVED + 2 * requests
        conv = (shape.conv_channels, layer.window)
        conv = conv[::-1] if layer.family is Family.KDA else conv
        state = (shape.num_heads, shape.value_dim, shape.key_dim)
        self.conv = torch.full((1, slots, *conv), POISON, dtype=dtype)
        self.temporal = torch.full((1, slots, *state), POISON)
        self.rows = torch.full((1, requests + 1, drafts, *state), POISON)
        # SGLang lets the windows of a chain's rows overlap. Trees, and KDA, have a window for each row.
        shared = not tree and layer.family is not Family.KDA
        apart = (1, requests + 1, drafts, *conv)
        self.windows = _overlapping(conv, dtype, drafts, requests) if shared else torch.full(apart, POISON, dtype=dtype)
        self.state = member("srt.mem_cache.memory_pool", "MambaPool").SpeculativeState(
            conv=[self.conv],
            temporal=self.temporal,
            intermediate_ssm=self.rows,
            intermediate_conv_window=[self.windows],
        )
        self.mamba_pool = StandIn(
            mamba_cache=self.state,
            enable_linear_replayssm=False,
            replayssm_write_pos=None,
            replayssm_cache_base=None,
            replayssm_spec_fold=False,
            replayssm_is_kda=False,
            linear_replayssm_cache_len=0,
        )

    def __getattr__(self, name: str) -> Any:
        raise Missing(f"this release reads {name!r} of its pool, which the judge does not set")

    def get_mamba_indices(self, requests: torch.Tensor) -> torch.Tensor:
        """Return the slot of each row of the request table, int32. Row 0 is padding."""
        return torch.cat([self.slots.new_zeros(RESERVED), self.slots])[requests].int()

    def translate_mamba_indices(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the slots, as in a pool that is not unified with KV."""
        return slots

    def mamba2_layer_cache(self, layer: int) -> Any:
        """Return the tensors of one layer."""
        return self.state.at_layer_idx(layer)

    def get_speculative_mamba2_params_all_layers(self) -> Any:
        """Return the tensors of all layers, which claim to lie on a GPU: SGLang's commit checks that."""
        kind = type(self.state)
        found = {}
        for one in fields(self.state):
            value = getattr(self.state, one.name)
            found[one.name] = [_claim(part) for part in value] if isinstance(value, list) else _claim(value)
        return kind(**found)


class OnGpu(torch.Tensor):
    """Tensor on a CPU that claims to lie on a GPU, for checks in front of a kernel that the interpreter runs."""

    is_cuda = True


def _claim(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else tensor.as_subclass(OnGpu)


def _overlapping(conv: tuple[int, ...], dtype: torch.dtype, drafts: int, requests: int) -> torch.Tensor:
    channels, window = conv
    held = torch.full((1, requests + 1, channels, drafts + window - 1), POISON, dtype=dtype)
    strides = (held.stride(0), held.stride(1), 1, held.stride(2), 1)
    return held.as_strided((1, requests + 1, drafts, channels, window), strides)
