"""Llama-shaped decoder in 6 to 16 launches a layer, over the weights of the transformers model itself.

A forward with few rows is bound by launches; a captured graph pays one to two microseconds for each. transformers'
modules make 40 launches a layer: eight for an RMSNorm, ten for rotary positions, one for every projection. Here:

* A norm is one launch. Rotary positions are one launch, or four without a compiler (`elementwise`).
* q, k and v are one matrix product. gate and up are another.
* The products that compute a residual also add it.
* For one row on CUDA, a product also computes the norm before it, and rotary positions or SwiGLU after it
  (`row_kernels`).

In half precision the last bit may differ from transformers' result. `probe` compares the logits of both paths before
this path is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .attention import LayerAttention, Run
from .elementwise import Elementwise, elementwise
from .rotary import Rotary

FAMILIES = frozenset(("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"))
"""transformers' classes with these layers: RMSNorm, attention with full rotary positions, RMSNorm, SwiGLU."""

DEVICES = frozenset(("cpu", "cuda"))
"""Device types on which this path has run. Other devices run transformers' own modules."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class FusedDecoder:
    """Runs a Llama-shaped model from token ids to logits. Capturable; hooks on transformers' modules do not run.

    The constructor packs the model's projections; see `Packed` for the effect on its parameters.

    Args:
        hf: a model for which `fits` returns True.
        layers: verified attention parameters of each layer.
    """

    def __init__(self, hf: Any, layers: Sequence[LayerAttention]) -> None:
        self._embed, self._rotary, self._lm_head = hf.get_input_embeddings(), hf.model.rotary_emb, hf.lm_head
        self._norm = hf.model.norm
        one, inner = layers[0], hf.config.intermediate_size  # in these families all layers have the first layer's shape
        kernels = elementwise(hf.lm_head.weight, one.num_qo_heads, one.num_kv_heads, one.head_dim, inner)
        self._layers = [_Layer(block, layer, kernels) for block, layer in zip(hf.model.layers, layers, strict=True)]
        if kernels.row_product is not None:
            self._layers[0].rehearse()

    @torch.no_grad()
    def __call__(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        run: Run,
        logits_rows: torch.Tensor | None = None,
        taps: Sequence[int] = (),
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run the model; for arguments and logits see `CausalLM.forward`.

        Args:
            taps: hidden states to keep, counted as in `FeatureTaps`.

        Returns:
            Logits, and one tensor ``[rows, hidden_size]`` for each of `taps`.
        """
        hidden = self._embed(token_ids)
        cos, sin = self._rotation(hidden, positions)
        states = {}
        for index, layer in enumerate(self._layers):
            if index in taps:
                states[index] = hidden.clone()  # a copy, because the next layer adds to `hidden` in place
            layer.add_to(hidden, cos, sin, partial(run, index, layer.attention))
        hidden = states[len(self._layers)] = _normed(self._norm, hidden)
        wanted = hidden if logits_rows is None else hidden.index_select(0, logits_rows)
        logits: torch.Tensor = self._lm_head(wanted).float()
        return logits, [states[tap] for tap in taps]

    def _rotation(self, hidden: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, ``[rows, 1, head_dim]`` each, in the layout that `rotated` reads."""
        cos, sin = self._rotary(hidden, positions[None])
        first, second = sin[0].chunk(2, -1)
        return cos[0][:, None], torch.cat((-first, second), -1)[:, None]


class _Layer:
    """Decoder layer of the fused model."""

    def __init__(self, block: Any, attention: LayerAttention, kernels: Elementwise) -> None:
        self.attention, self._kernels = attention, kernels
        self._norms = block.input_layernorm, block.post_attention_layernorm
        self._qkv = Packed(block.self_attn.q_proj, block.self_attn.k_proj, block.self_attn.v_proj)
        self._o, self._down = block.self_attn.o_proj, block.mlp.down_proj
        self._gate_up = Packed(block.mlp.gate_proj, block.mlp.up_proj)

    def add_to(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> None:
        """Add the outputs of attention and MLP to ``hidden [rows, hidden_size]`` in place."""
        if self._kernels.row_product is not None and len(hidden) == 1:
            self._add_row(hidden, cos, sin, attend, self._kernels.row_product)
            return
        num_q, num_kv = self.attention.num_qo_heads, self.attention.num_kv_heads
        qkv = self._qkv(_normed(self._norms[0], hidden))
        heads = qkv.view(len(qkv), -1, self.attention.head_dim)
        q, k = self._kernels.rotated(heads, num_q, num_kv, cos, sin)
        _add_product(hidden, attend(q, k, heads[:, num_q + num_kv :]).flatten(1), self._o)
        gate_up = self._gate_up(_normed(self._norms[1], hidden))
        _add_product(hidden, self._kernels.swiglu(gate_up), self._down)

    def rehearse(self) -> None:
        """Run the layer on one row of zeros, so that its kernels are compiled before the first forward."""
        weight = self._o.weight
        angles = weight.new_zeros(1, 1, self.attention.head_dim)
        with torch.no_grad():
            self.add_to(weight.new_zeros(1, weight.shape[0]), angles, angles, lambda q, k, v: q)

    def _add_row(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend,
        product: Callable[..., torch.Tensor],
    ) -> None:  # fmt: skip
        """Do `add_to` for one row."""
        (before, after), qkv, gate_up = self._norms, self._qkv, self._gate_up
        num_q, num_kv = self.attention.num_qo_heads, self.attention.num_kv_heads
        heads = product(
            hidden, qkv.weight, hidden.new_empty(1, len(qkv.weight)), bias=qkv.bias,
            norm=before.weight, eps=before.variance_epsilon, rotary=Rotary(cos, sin, num_q + num_kv),
        ).view(1, -1, self.attention.head_dim)  # fmt: skip
        q, k, v = heads[:, :num_q], heads[:, num_q : num_q + num_kv], heads[:, num_q + num_kv :]
        product(attend(q, k, v).flatten(1), self._o.weight, hidden, bias=self._o.bias, add=True)
        inner = product(
            hidden, gate_up.weight, hidden.new_empty(1, len(gate_up.weight) // 2), bias=gate_up.bias,
            norm=after.weight, eps=after.variance_epsilon, gated=True,
        )  # fmt: skip
        product(inner, self._down.weight, hidden, bias=self._down.bias, add=True)


def _normed(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _add_product(hidden: torch.Tensor, x: torch.Tensor, linear: nn.Linear) -> None:
    hidden.addmm_(x, linear.weight.t())
    if linear.bias is not None:
        hidden.add_(linear.bias)


def fits(hf: Any, layers: Sequence[LayerAttention]) -> bool:
    """Return True if `FusedDecoder` supports the model: known class and device, unmodified, full attention."""
    known = type(hf).__name__ in FAMILIES and type(hf).__module__.startswith("transformers.models.")
    known = known and hf.device.type in DEVICES
    if not known or any(layer.window_left >= 0 or layer.logits_soft_cap or layer.sinks for layer in layers):
        return False
    one_dtype = len({parameter.dtype for parameter in hf.parameters()}) == 1
    return one_dtype and hf.config.hidden_act == "silu" and all(map(_plain, hf.modules()))


def _plain(module: nn.Module) -> bool:
    """Return True for a module without hooks or a replaced forward, and not of a subclass of `nn.Linear`."""
    changed = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return not changed and (type(module) is nn.Linear or not isinstance(module, nn.Linear))


class Packed:
    """Runs several linear layers as one matrix product: ``[layer(x) for layer in linears]``, concatenated.

    The layers' parameters become views of the packed tensors, so nothing is stored twice. Writes to them in place are
    visible here. Moving the module (`Module.to`) breaks the views, so pack last.

    Args:
        linears: all with a bias, or all without.

    Attributes:
        weight, bias: the packed tensors; bias is None without biases.
    """

    def __init__(self, *linears: nn.Linear) -> None:
        self.weight = _pack(linears, "weight")
        self.bias = _pack(linears, "bias") if linears[0].bias is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the concatenated outputs: ``[…, in]`` → ``[…, sum of the layers' out]``."""
        return F.linear(x, self.weight, self.bias)


def _pack(linears: Sequence[nn.Linear], name: str) -> torch.Tensor:
    own = [getattr(linear, name) for linear in linears]
    packed = torch.cat([parameter.detach() for parameter in own])
    parts = torch.split(packed, [len(parameter) for parameter in own])
    for linear, parameter, part in zip(linears, own, parts, strict=True):
        setattr(linear, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    return packed
