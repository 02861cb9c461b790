"""Check that draftmark's attention reproduces the model's own attention, by running the model on a few tokens.

Three short forwards run:

1. draftmark's attention over two packed requests, of a latent model in the absorbed form;
2. transformers' own attention over the same requests;
3. draftmark's attention again, with the second request moved to the end of the context.

A model with recurrent state also runs a prefill and decodes, with the states of draftmark's reference.

In a mixture of experts, rounding may select other experts. If the first two differ by more than rounding, the first is
run again with the experts of the second.

The forwards prove that every layer calls the registry exactly once, that only attention mixes rows, and that positions
reach the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from textwrap import shorten
from typing import Any, NamedTuple

import torch

from draftmark import DraftmarkError, ModelError

from ..memory import is_out_of_memory
from .attention import LayerAttention
from .causal_lm import packed_forward
from .files import MOST_OF_A_CAUSE
from .fused import FusedDecoder, fits
from .latent import absorb
from .layer_kinds import attention_layers
from .refusals import is_latent
from .routing import Routing
from .states import HybridLayers, ProbeStates

REQUESTS, TOKENS = 2, 4
"""Number of packed requests, and of tokens in each."""
PIECES = (2, 1, 1)
"""Tokens of each request in the forwards over a model with state: one prefill, then decodes."""
TOLERANCE = {torch.bfloat16: 0.1, torch.float16: 2e-2}
"""Largest relative difference of logits, by dtype.

A dropped feature makes 0.2 or more. Rounding made up to 2.6e-2 in bfloat16 and 5e-3 in float16, over all tiny families
and SmolLM2-135M."""
STATE_FACTOR = 2
"""Factor on the tolerances for a model with state, because a state carries rounding from row to row.

Tiny hybrids differed by up to 7.1e-2 in bfloat16 and 3e-2 in float16. transformers' own logits differ from float32 by
up to 0.27 and 3.5e-2."""
FLOAT32_TOLERANCE = 1e-2
"""Largest relative difference of logits in float32. Rounding makes 1e-6 here, and 1e-3 with TF32 on."""


class Probed(NamedTuple):
    """Arguments with which each layer calls attention.

    Attributes:
        layers: attention parameters.
        sinks: attention sinks, as in `Layered.sinks`.
    """

    layers: tuple[LayerAttention, ...]
    sinks: tuple[torch.Tensor | None, ...]


def probe(hf: Any, name: str, hybrid: HybridLayers | None = None) -> Probed:
    """Return the arguments with which each layer calls attention.

    Args:
        hybrid: layers with state; None for a model without.

    Raises:
        ModelError: the family bypasses the attention registry, or its logits would differ from transformers' own.
    """
    return probed_by(lambda: _probe(hf, hybrid), hf, name, attention_layers(hf.config.get_text_config()))


def probed_by(run: Callable[[], ProbeAttention], hf: Any, name: str, decoder_layers: Sequence[int]) -> Probed:
    """Return what a probe of the `decoder_layers` with attention recorded. `run` runs the probe, in inference mode.

    Raises:
        ModelError: the probe failed.
    """
    try:
        with torch.inference_mode():
            attention = run()
        layers = attention.layers(decoder_layers)
        # This runs outside of inference mode, so that converted sinks are ordinary tensors.
        sinks = [attention.sinks[layer] for layer in decoder_layers]
        return Probed(layers, tuple(None if one is None else one.detach().float().contiguous() for one in sinks))
    except DraftmarkError as error:
        raise _refusal(hf, name, str(error)) from None
    except Exception as error:  # a model that does not support this forward can raise any exception
        if is_out_of_memory(error):
            raise
        cause = shorten(" ".join(str(error).split()), MOST_OF_A_CAUSE, placeholder=" …")
        raise _refusal(hf, name, f"its forward raised {type(error).__name__}: {cause}; use another model") from error


def fused_decoder(hf: Any, layers: tuple[LayerAttention, ...]) -> FusedDecoder | None:
    """Make the fused forward of a model, or return None if there is none or its logits differ."""
    if not fits(hf, layers):
        return None
    tokens, near = rows_of(hf)
    fused = FusedDecoder(hf, layers)
    with torch.inference_mode():
        error = difference(fused(tokens, near, ProbeAttention())[0], packed_forward(hf, tokens, near, ProbeAttention()))
    return fused if error <= TOLERANCE.get(hf.dtype, FLOAT32_TOLERANCE) else None


def _probe(hf: Any, hybrid: HybridLayers | None) -> ProbeAttention:
    config = hf.config.get_text_config()
    if is_latent(config):
        absorb(hf)
    tokens, near = rows_of(hf)
    far = near.clone()
    far[TOKENS:] += max(0, int(config.max_position_embeddings) - TOKENS)

    attention = ProbeAttention()
    ours = _whole(hf, hybrid, tokens, near, attention)
    attention.layers(attention_layers(config))
    routing = Routing(hf)
    with routing.recorded():
        own = hf(input_ids=tokens.view(REQUESTS, TOKENS), use_cache=False).logits.float().flatten(0, 1)
    if not own.isfinite().all():
        raise ModelError(
            f"its own forward gives logits that are not finite in {str(hf.dtype).removeprefix('torch.')}: weights are "
            "damaged, or too large for this dtype; download them again, or use float32"
        )
    moved = _whole(hf, hybrid, tokens, far, ProbeAttention())
    one, same, factor = slice(TOKENS), ours, STATE_FACTOR if hybrid else 1
    if routing and differs(hf.dtype, ours, own):
        with routing.repeated():
            same = _whole(hf, hybrid, tokens, near, ProbeAttention())
    unlike = "its logits differ from transformers' own by {}, so a part of it is not supported"
    compare(hf.dtype, same, own, unlike, factor)
    compare(hf.dtype, moved[one], ours[one], "a request's logits change by {} with the positions of another request")
    if hybrid is not None:
        _compare_pieces(hf, hybrid, routing, own)
    return attention


def _whole(
    hf: Any, hybrid: HybridLayers | None, tokens: torch.Tensor, positions: torch.Tensor, attention: ProbeAttention
) -> torch.Tensor:
    """Return the logits of one forward over all rows."""
    if hybrid is None:
        return packed_forward(hf, tokens, positions, attention)
    states = ProbeStates(hybrid.shapes, REQUESTS, TOKENS, hf.device)
    with hybrid.running(states), states.forward(TOKENS):
        return packed_forward(hf, tokens, positions, attention)


def _compare_pieces(hf: Any, hybrid: HybridLayers, routing: Routing, own: torch.Tensor) -> None:
    """Run a prefill and decodes of the probe's rows, and raise `ModelError` if their logits differ from `own`."""
    attention, states = ProbeAttention(), ProbeStates(hybrid.shapes, REQUESTS, TOKENS, hf.device)
    tokens, positions = rows_of(hf)
    every = torch.arange(REQUESTS * TOKENS, device=hf.device).view(REQUESTS, TOKENS)
    start = 0
    for count in PIECES:
        rows = every[:, start : start + count].flatten()
        routed = routing.repeated(rows) if routing else nullcontext()
        with hybrid.running(states), states.forward(count), routed:
            ours = packed_forward(hf, tokens[rows], positions[rows], attention)
        unlike = f"its logits after {start} tokens differ from those of one forward by {{}}, so its state is not kept"
        compare(hf.dtype, ours, own[rows], unlike, STATE_FACTOR)
        start += count


def rows_of(hf: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and positions of the packed requests."""
    # Tokens are distinct, so that swapped rows change the logits.
    tokens = torch.arange(REQUESTS * TOKENS, device=hf.device) * 7919 + 11
    return tokens % int(hf.config.get_text_config().vocab_size), torch.arange(TOKENS, device=hf.device).repeat(REQUESTS)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return the largest difference relative to the largest logit; NaN if any value is NaN."""
    return float((got - want).abs().max() / want.abs().max())


def differs(dtype: torch.dtype, got: torch.Tensor, want: torch.Tensor, factor: float = 1.0) -> bool:
    """Return True if the logits differ by more than `factor` times the tolerance. NaN differs."""
    return not difference(got, want) <= factor * TOLERANCE.get(dtype, FLOAT32_TOLERANCE)


def compare(dtype: torch.dtype, got: torch.Tensor, want: torch.Tensor, sentence: str, factor: float = 1.0) -> None:
    """Raise `ModelError` if logits differ by more than `differs` allows; `sentence` has a place for the difference."""
    if differs(dtype, got, want, factor):
        raise ModelError(sentence.format(f"{difference(got, want):.2g} (relative)") + "; use another model")


def _refusal(hf: Any, name: str, reason: str) -> ModelError:
    family = getattr(hf.config.get_text_config(), "model_type", "unknown")
    return ModelError(f"model {name!r} (family {family}) cannot be decoded: {reason}")


class ProbeAttention:
    """`Run` that records each layer's call and computes plain causal attention over the probe's rows.

    Each call of a layer appends the same number of tokens to every request.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[int, LayerAttention]] = []
        self.sinks: dict[int, torch.Tensor | None] = {}
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
        """Attend in float32, as transformers' softmax does; for arguments and result see `attention.Run`."""
        dtype, v = q.dtype, k if v is None else v
        self.calls.append((layer, called))
        self.sinks[layer] = sinks
        # [requests, heads, tokens, head_dim]; query heads of a group are adjacent
        count = len(q) // REQUESTS
        q, k, v = (t.reshape(REQUESTS, count, -1, called.head_dim).transpose(1, 2).float() for t in (q, k, v))
        k, v = (t.repeat_interleave(called.num_qo_heads // called.num_kv_heads, dim=1) for t in (k, v))
        if layer in self._stored:
            k, v = (torch.cat(pair, 2) for pair in zip(self._stored[layer], (k, v), strict=True))
        self._stored[layer] = k, v
        scores = q @ k.transpose(-1, -2) * called.softmax_scale
        if called.logits_soft_cap:
            scores = torch.tanh(scores / called.logits_soft_cap) * called.logits_soft_cap
        row = torch.arange(k.shape[2], device=q.device)
        back = row[-count:, None] - row
        hidden = back < 0 if called.window_left < 0 else (back < 0) | (back > called.window_left)
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:  # the sink is one more logit column, without a value vector
            scores = torch.cat((scores, sinks.float().view(1, -1, 1, 1).expand(REQUESTS, -1, count, 1)), -1)
        out = scores.softmax(-1)[..., : len(row)] @ v[..., : called.value_width]
        return out.transpose(1, 2).flatten(0, 1).to(dtype)

    def layers(self, expected: Sequence[int]) -> tuple[LayerAttention, ...]:
        """Return the recorded calls.

        Raises:
            ModelError: the `expected` decoder layers did not call attention exactly once each, in order.
        """
        got = [layer for layer, _ in self.calls]
        if got != list(expected):
            raise ModelError(
                f"{len(got)} attention calls of {len(set(got))} layers reached transformers' attention registry, but "
                f"the model has {len(expected)} layers with attention, and each must call it once; use a family whose "
                "attention goes through the registry"
            )
        return tuple(called for _, called in self.calls)
