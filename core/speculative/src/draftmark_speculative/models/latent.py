"""Absorbed form of multi-head latent attention (MLA): one latent row per token instead of keys and values per head.

transformers projects the latent c of every token to keys and values of each head, W_UK c and W_UV c, with the rows of
``kv_b_proj``. Its attention modules do this in one method, ``expand_kv(c, rotated)``. Here q·(W_UK c) is computed as
(W_UKᵀ q)·c, and Σ p (W_UV c) as W_UV (Σ p c). So the key of a token is its latent row (c, rotated part), the value is
c, and the paged cache stores the row once for all heads (DeepSeek-V2, arXiv:2405.04434, section 2.1.2).

All other work stays transformers' own: projections, norms, factors on queries, and the family's rotary convention.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from draftmark import ModelError

from .attention import LATENT, NAME

WIDTHS = ("num_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class Absorbed:
    """Absorbed attention of one transformers module. The weights are views of the module's ``kv_b_proj``.

    Attributes:
        value_dim: width of the latent c, the module's kv_lora_rank.
    """

    def __init__(self, module: Any) -> None:
        self._module = module
        self.value_dim: int = module.kv_lora_rank
        self._nope: int = module.qk_nope_head_dim

    def expand_kv(self, latent: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token's key and value as transformers' method does; in a draftmark forward, its latent row.

        Args:
            latent: ``[batch, 1, rows, value_dim]``, normalized.
            rotated: ``[batch, 1, rows, qk_rope_head_dim]``, with rotary positions applied.

        Returns:
            In a draftmark forward ``[batch, 1, rows, value_dim + qk_rope_head_dim]`` and `latent`, else keys and
            values of all heads.
        """
        if self._module.config._attn_implementation == NAME:
            return torch.cat((latent, rotated), -1), latent
        expanded: tuple[torch.Tensor, torch.Tensor] = type(self._module).expand_kv(self._module, latent, rotated)
        return expanded

    def queries(self, query: torch.Tensor) -> torch.Tensor:
        """Return queries of the latent rows: ``[1, heads, rows, nope + rope]`` → ``[1, heads, rows, row width]``."""
        nope, rotated = torch.split(query[0], [self._nope, query.shape[-1] - self._nope], -1)
        up_keys = self._weight()[:, : self._nope]
        return torch.cat((torch.bmm(nope, up_keys), rotated), -1)[None]

    def values(self, out: torch.Tensor) -> torch.Tensor:
        """Return each head's own values: ``[rows, heads, value_dim]`` → ``[rows, heads, v_head_dim]``."""
        up_values = self._weight()[:, self._nope :]
        return torch.bmm(out.transpose(0, 1), up_values.transpose(1, 2)).transpose(0, 1)

    def _weight(self) -> torch.Tensor:
        """Return ``kv_b_proj`` as ``[heads, nope + v_head_dim, value_dim]``."""
        weight: torch.Tensor = self._module.kv_b_proj.weight
        return weight.view(self._module.num_heads, -1, self.value_dim)


def absorb(hf: Any) -> None:
    """Make every attention module of the model run in the absorbed form during draftmark forwards.

    The model's own forward does not change. `restore` undoes this.

    Raises:
        ModelError: an attention module has no ``expand_kv`` or no plain ``kv_b_proj``.
    """
    found = [(name, module) for name, module in hf.named_modules() if hasattr(module, "kv_b_proj")]
    if not found:
        raise ModelError(
            "it has a latent (kv_lora_rank), but no attention module with kv_b_proj, so the keys cannot be absorbed; "
            "use a family with DeepSeek's attention"
        )
    for name, module in found:
        _check(name, module)
    for _, module in found:
        absorbed = Absorbed(module)
        setattr(module, LATENT, absorbed)
        module.expand_kv = absorbed.expand_kv


def restore(hf: Any) -> None:
    """Undo `absorb`."""
    for module in hf.modules():
        if vars(module).pop(LATENT, None) is not None:
            del module.expand_kv


def _check(name: str, module: Any) -> None:
    lacking = [one for one in (*WIDTHS, "expand_kv") if not hasattr(module, one)]
    if lacking:
        raise ModelError(
            f"its attention {name} has a latent, but no {lacking[0]}, through which draftmark reads the latent rows; "
            "use transformers 5.20 or later and a family with DeepSeek's attention"
        )
    linear, width = module.kv_b_proj, module.qk_nope_head_dim + module.v_head_dim
    shape = [module.num_heads * width, module.kv_lora_rank]
    if type(linear) is not nn.Linear or linear.bias is not None or list(linear.weight.shape) != shape:
        raise ModelError(
            f"its {name}.kv_b_proj is not a plain {shape[0]} x {shape[1]} matrix (it is quantized, has a bias or has "
            "another shape), so the keys cannot be absorbed; use weights in float32, bfloat16 or float16"
        )
