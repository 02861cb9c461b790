"""Interface between transformers' attention layers and draftmark's attention.

transformers looks attention up by name in a registry. draftmark registers ``"draftmark"`` **without a mask function**:
a mask function would run packed-sequence detection, which reads the device on the host. The model is called with its
rows packed into a batch of one. Every layer passes q, k and v to the `Run` that the forward received as a keyword.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from draftmark import ModelError

NAME = "draftmark"
"""Name in transformers' attention registry."""
RUN = "draftmark_run"
"""Keyword that carries a `Run` from `CausalLM.forward` to the attention function."""
LATENT = "draftmark_latent"
"""Attribute of an attention module that runs in the absorbed form; see `latent.Absorbed`."""

HARMLESS = frozenset(
    ("position_ids", "use_cache", "cache_position", "output_hidden_states", "return_dict", "output_router_logits")
)
"""Keywords that models pass to attention and that do not change its result, with any value."""


class AttentionStep(Protocol):
    """Computes the attention of every layer in one forward. The engine binds it to a batch, caches and backends."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None) -> torch.Tensor:
        """Store k and v, compute attention, and return its output.

        Args:
            layer: layer with attention, from 0. Decoder layers without attention do not count.
            q: ``[rows, num_qo_heads, head_dim]`` in the model's dtype, RoPE applied; not contiguous.
            k, v: ``[rows, num_kv_heads, head_dim]``, RoPE applied to k; not contiguous. v is None for a latent layer.

        Returns:
            ``[rows, num_qo_heads, value_dim]`` in q's dtype.
        """


@dataclass(frozen=True)
class LayerAttention:
    """Attention parameters of one decoder layer: `AttentionShape` without pages and dtypes.

    Attributes:
        softmax_scale: factor on q·k.
        window_left: positions visible to the left of a query, itself not counted; -1 means all.
        logits_soft_cap: cap · tanh(logit / cap) after scaling; 0 means none.
        sinks: each query head has one extra logit without a value; see `draftmark.runtime.KVCache`.
        value_dim: width of a value and of one head's output; None means head_dim.
        latent: k is a latent row, and the value is its first value_dim elements; see `draftmark.AttentionShape`.
        causal_block: in a draft block, a row sees no later row.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    window_left: int = -1
    logits_soft_cap: float = 0.0
    sinks: bool = False
    value_dim: int | None = None
    latent: bool = False
    causal_block: bool = False

    @property
    def value_width(self) -> int:
        """Width of a value and of one head's output."""
        return self.head_dim if self.value_dim is None else self.value_dim


class Run(Protocol):
    """Attention function of one forward; tensors as in `AttentionStep.attend`."""

    def __call__(
        self,
        layer: int,
        called: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output of a layer that was called with the parameters `called`.

        Args:
            sinks: ``[num_qo_heads]`` in the model's dtype; None for a layer without sinks.
        """


def checked(
    step: AttentionStep, layers: tuple[LayerAttention, ...], decoder_layers: Sequence[int] | None = None
) -> Run:
    """Return a `Run` that passes calls equal to `layers` to `step` and raises `ModelError` for other calls.

    Args:
        decoder_layers: decoder layer of each of `layers`; None if every decoder layer has attention.
    """
    places = {decoder: place for place, decoder in enumerate(decoder_layers or range(len(layers)))}

    def run(
        layer: int,
        called: LayerAttention,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        sinks: torch.Tensor | None = None,  # ignored: backends read `Layered.sinks`
    ) -> torch.Tensor:
        place = places[layer]
        if called != layers[place]:
            raise ModelError(
                f"layer {layer} called attention with {called}, but {layers[place]} was verified when the model "
                "was loaded; load the model again after changing its configuration"
            )
        return step.attend(place, q, k, v)

    return run


@contextmanager
def attention_of(config: Any) -> Iterator[None]:
    """Run a model with draftmark's attention inside the context, and restore its own attention afterwards.

    This function writes two attributes of the model's (text) `config` and does no device work, so a captured region may
    contain the context.
    """
    own = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = own


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """Attention function for transformers: q, k, v ``[1, heads, rows, head_dim]`` → out ``[1, rows, heads, dim]``.

    A module with the attribute `LATENT` passes its latent rows as keys, with one head.
    """
    run: Run | None = arguments.pop(RUN, None)
    if run is None:
        raise ModelError(
            f"{type(module).__name__} called the attention 'draftmark' without a run: its family does not pass "
            "keywords to attention, or the model ran outside CausalLM.forward; call CausalLM.forward, or use a "
            "family that passes them"
        )
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise ModelError(
            f"{type(module).__name__} has no layer_idx, so its layers cannot be distinguished; use another model"
        )
    if attention_mask is not None or not getattr(module, "is_causal", True):
        raise ModelError(
            f"{type(module).__name__} of layer {layer} is not plain causal attention (it passes its own mask or "
            "attends both ways), which paged attention would run incorrectly; use a decoder-only causal model"
        )
    sinks: torch.Tensor | None = arguments.pop("s_aux", None)
    absorbed = getattr(module, LATENT, None)
    if absorbed is None:
        called = _read(layer, query, key, value, sinks, arguments)
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return run(layer, called, q, k, v, sinks).unsqueeze(0), None
    query = absorbed.queries(query)
    called = _read(layer, query, key, value, sinks, arguments, absorbed.value_dim)
    out = run(layer, called, query[0].transpose(0, 1), key[0].transpose(0, 1), None, sinks)
    return absorbed.values(out).unsqueeze(0), None


def _read(
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    arguments: dict[str, Any],
    latent_dim: int | None = None,
) -> LayerAttention:
    """Return the layer's attention parameters as called; raise `ModelError` for unknown arguments."""
    scaling, window, cap = (arguments.pop(name, None) for name in ("scaling", "sliding_window", "softcap"))
    _refuse_unknown(layer, arguments)
    head_dim = query.shape[-1]
    if latent_dim is None and (key.shape != value.shape or key.shape[-1] != head_dim):
        raise ModelError(
            f"layer {layer} has keys {list(key.shape)} and values {list(value.shape)} for queries {list(query.shape)}, "
            "but the loop stores both alike, or one latent row; use a grouped-query model, or DeepSeek's attention"
        )
    if sinks is not None and sinks.shape != (query.shape[1],):
        raise ModelError(
            f"layer {layer} has sinks (s_aux) of shape {list(sinks.shape)}, but draftmark serves one logit for each of "
            f"its {query.shape[1]} query heads; use another model"
        )
    return LayerAttention(
        query.shape[1],
        key.shape[1],
        head_dim,
        head_dim**-0.5 if scaling is None else float(scaling),
        -1 if window is None else int(window) - 1,
        float(cap or 0.0),
        sinks is not None,
        latent_dim,
        latent_dim is not None,
    )


def _refuse_unknown(layer: int, arguments: dict[str, Any]) -> None:
    known = {"dropout": (0, 0.0), "is_causal": (True,), "output_attentions": (False,)}
    for name, value in arguments.items():
        if value is None or name in HARMLESS:
            continue
        if isinstance(value, (bool, int, float)) and value in known.get(name, ()):
            continue
        shown = value if isinstance(value, (bool, int, float, str)) else type(value).__name__
        raise ModelError(
            f"layer {layer} passes {name}={shown} to its attention, which draftmark does not implement and would "
            f"ignore{_MEANING.get(name, '')}; use a model without it"
        )


_MEANING = {
    "position_bias": " (a bias on the logits)",
    "indices": " (sparse attention)",
    "block_indices": " (sparse attention)",
    "is_causal": " (attention that looks ahead)",
}

AttentionInterface.register(NAME, _attention)
