"""Block draft head: decoder layers over mask tokens, which also attend to the target's features (DFlash).

Every layer stores keys and values of the target's features for committed tokens, without queries: the context. A block
is the newest token, the root, followed by mask tokens. One forward over the block predicts one token in each mask row::

    context = feature_norm(feature_proj(target's features))     k, v of layer i = k_proj_i, v_proj_i of the context
    x = x + attention(attention_norm(x)) over context and block;  x = x + mlp(mlp_norm(x))

In a causal layer a row of the block sees no later row; in other layers it sees the whole block. Embedding and output
layer are the target's. See DFlash, Chen et al. 2026, arXiv:2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from draftmark import ModelError

from ..arguments import is_count
from ..eagle.config import HeadConfig
from ..eagle.layer import Attention, SwiGLU
from ..models import LayerAttention

AttendLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of one layer: ``attend(layer, q, k, v) -> out``, tensors as in `eagle.layer.Attend`."""


@dataclass(frozen=True)
class BlockConfig(HeadConfig):
    """Shape of a block draft head; the other fields are those of `HeadConfig`.

    Attributes:
        block_size: rows of a block: the root and block_size - 1 mask tokens.
        mask_token_id: token of the target's vocabulary. Mask rows read its embedding.
        causal: one entry for each layer, True if its blocks are causal.
        windows: sliding window of each layer as in `AttentionShape.window_left`; empty for none.

    Raises:
        ModelError: a field is out of range.
    """

    block_size: int = 8
    mask_token_id: int = 0
    causal: tuple[bool, ...] = (False,)
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_count(self.block_size) or self.block_size < 2:
            raise ModelError(
                f"the head's block_size is {self.block_size!r}, but it must be an integer >= 2: the root and a mask "
                "token; take it from the head's training"
            )
        if not is_count(self.mask_token_id) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ModelError(
                f"the head's mask_token_id is {self.mask_token_id!r}, but tokens are 0 … {self.vocab_size - 1}; use an "
                "unused token of the target"
            )
        if not self.causal or len(self.windows) not in (0, len(self.causal)):
            raise ModelError(
                f"the head has {len(self.causal)} layers (causal) and {len(self.windows)} windows, but it needs one "
                "layer or more, and a window for each or none; give both one entry for each layer"
            )


class BlockLayer(nn.Module):
    """Decoder layer of a block draft head."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.attention_norm = nn.RMSNorm(size, eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)


class BlockHead(nn.Module):
    """Block draft head; the module's docstring specifies it. Capturable: no host read, no data-dependent shape."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.feature_proj = nn.Linear(config.num_features * size, size, bias=False)
        self.feature_norm = nn.RMSNorm(size, config.rms_norm_eps)
        self.blocks = nn.ModuleList(BlockLayer(config) for _ in config.causal)
        self.output_norm = nn.RMSNorm(size, config.rms_norm_eps)

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """Attention parameters of each layer, as in `CausalLM.layers`."""
        c = self.config
        windows = c.windows or (-1,) * len(c.causal)
        shape = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim**-0.5
        pairs = zip(windows, c.causal, strict=True)
        return tuple(LayerAttention(*shape, window, causal_block=causal) for window, causal in pairs)

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """Attention sinks of each layer: none."""
        return (None,) * len(self.config.causal)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.feature_proj.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.feature_proj.weight.device

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Compute the context of target features: ``[…, num_features · hidden_size]`` → ``[…, hidden_size]``."""
        context: torch.Tensor = self.feature_norm(self.feature_proj(features))
        return context

    def keys_values(
        self, layer: int, context: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values of context rows, ``[rows, num_key_value_heads, head_dim]`` each.

        Args:
            context: ``[rows, hidden_size]``, from `fuse`.
            positions: int64 ``[rows]``, positions of the committed tokens.
        """
        return cast(list[BlockLayer], self.blocks)[layer].attention.keys_values(context, positions)

    def forward(self, embeddings: torch.Tensor, positions: torch.Tensor, attend: AttendLayer) -> torch.Tensor:
        """Run all layers over blocks.

        Args:
            embeddings: ``[rows, hidden_size]``: of the root, then of the mask token, in each block.
            positions: int64 ``[rows]``.
            attend: attention over context and block; called once for each layer, in order.

        Returns:
            ``[rows, hidden_size]``: row i of a block predicts the token i positions after the root, from row 1 on.
        """
        x = embeddings
        for layer, block in enumerate(cast(list[BlockLayer], self.blocks)):

            def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, layer: int = layer) -> torch.Tensor:
                assert v is not None, "a block head has keys and values"
                return attend(layer, q, k, v)

            x = x + block.attention(block.attention_norm(x), positions, run)
            x = x + block.mlp(block.mlp_norm(x))
        hidden: torch.Tensor = self.output_norm(x)
        return hidden

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """Score the tokens of mask rows: ``[…, hidden_size]`` → ``[…, vocab_size]``."""
        return nn.functional.linear(hidden, lm_head.to(hidden.dtype))
