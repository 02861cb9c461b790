"""Draft head: one decoder layer that predicts the tokens that follow the target's newest token.

This text specifies the head for training. A **row** of the head stands at a position p of a request. It has two inputs:

* The **feature** of position p: the target's hidden states ``feature_layers`` at token p, concatenated,
  ``[num_features · hidden_size]``.
* The **embedding of token p + 1**, from the target's own input embedding.

From these inputs, and through attention over the rows of positions 0 … p, the row predicts **token p + 2**. For a
text ``t[0], …, t[n-1]`` and the target's features ``f[0], …, f[n-1]``::

    inputs    e[p] = embed(t[p + 1]), f[p], position p       p = 0 … n - 3
    label     t[p + 2], or better the target's own distribution there: its logits at position p + 1

Rotary positions are p (the feature's), in training and in decoding. While drafting, the target has no features beyond
the newest committed token, so the head reads **its own output** instead. `forward` returns a hidden state
``[hidden_size]`` that replaces the result of `fuse` in the next row. A head that drafts S tokens deep should also be
trained on its own outputs (EAGLE-3 calls this training-time test)::

    g = head.fuse(features)                                 # from the target: [.., hidden_size]
    g = head(embed(tokens_shifted_by_1), g, positions, attend)   # predicts p + 2; g is the feature of position p + 1
    g = head(embed(tokens_shifted_by_2), g, positions + 1, attend)   # predicts p + 3, and so on
    logits = head.logits(g, target_lm_head_weight)

In step j ≥ 1 of that chain, the row of position p + j sees two kinds of rows: the step-0 rows of positions 0 … p (from
the target's features), and the rows of steps 1 … j of its own chain. In decoding the KV cache contains these rows.
`attend` implements this mask. `dense_attention` is plain causal attention for step 0.

Attention is the callable `attend(q, k, v) -> out`. A trainer passes dense attention over
``[batch, rows, heads, head_dim]``; the engine passes its paged cache over ``[rows, heads, head_dim]``. `q` and `k` are
already rotated; the scale is head_dim ** -0.5; heads are grouped-query.

The head has no embedding and no output layer of its own. It uses the target's (`CausalLM.embed`, `CausalLM.lm_head`).
With a **reduced draft vocabulary** it scores only the ``draft_vocab_size`` rows of the output layer that `d2t` lists:
draft token i is target token ``d2t[i]``. Set `head.d2t` before training; it is saved with the weights.

Files: a folder with head.json (`HeadConfig`) and head.safetensors, written by `save` and read by `load`. Weights may be
stored in bfloat16 or float32; `load` converts them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftmark import ModelError

from ..models import LayerAttention
from ..models.elementwise import elementwise
from .config import HeadConfig
from .layer import Attend, Attention, SwiGLU

WEIGHTS = "head.safetensors"


class DraftHead(nn.Module):
    """EAGLE draft head; the module's docstring specifies it. Capturable: no host read, no data-dependent shape.

    Attributes:
        d2t: int64 ``[draft_vocab_size]``, the target token of each draft token; None for the whole vocabulary.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        # One feature is used without projection, because the head's own output must be able to replace it.
        self.feature_proj = nn.Linear(config.num_features * size, size, bias=False) if config.num_features > 1 else None
        self.embed_norm = nn.RMSNorm(size, eps)
        self.feature_norm = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.attention_norm = nn.RMSNorm(size, eps)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(size, eps)
        self.mlp = SwiGLU(size, config.intermediate_size)
        self.output_norm = nn.RMSNorm(size, eps)
        vocab = config.draft_vocab_size
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", None if vocab is None else torch.arange(vocab))

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """Attention parameters of the head's only layer, as in `CausalLM.layers`."""
        c = self.config
        return (LayerAttention(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim**-0.5),)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Hidden states of the target that the head reads."""
        return self.config.feature_layers

    @property
    def hidden_size(self) -> int:
        """Width of a feature and of the head's output."""
        return self.config.hidden_size

    @property
    def sinks(self) -> tuple[torch.Tensor | None, ...]:
        """Attention sinks of the head's only layer: none."""
        return (None,)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.fc.weight.device

    def pack(self) -> DraftHead:
        """Pack weights: q, k and v become one matrix product, gate and up another. Call it after the last `to`."""
        a, inner = self.attention, self.config.intermediate_size
        kernels = elementwise(self.fc.weight, a.num_q, a.num_kv, a.head_dim, inner)
        self.attention.pack(kernels)
        self.mlp.pack(kernels)
        return self

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Project features of the target, ``[…, num_features · hidden_size]`` → ``[…, hidden_size]``."""
        fused: torch.Tensor = features if self.feature_proj is None else self.feature_proj(features)
        return fused

    def forward(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Run the decoder layer over rows.

        Args:
            embeddings: ``[…, rows, hidden_size]``, embedding of the token *after* each row's position.
            fused: shaped like embeddings; `fuse` of the target's features, or this function's result of the last step.
            positions: int64 ``[…, rows]`` or ``[rows]``, positions of the features.
            attend: the attention; called once.

        Returns:
            Hidden state, shaped like embeddings: the input of `logits`, and `fused` of the next draft step.
        """
        x = fused + self.fc(torch.cat((self.embed_norm(embeddings), self.feature_norm(fused)), -1))
        x = x + self.attention(self.attention_norm(x), positions, attend)
        hidden: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """Score the token two positions after each row.

        Args:
            hidden: ``[…, hidden_size]``, from `forward`.
            lm_head: the target's output weight ``[vocab_size, hidden_size]``, or its `output_rows`.

        Returns:
            ``[…, draft_vocab_size or vocab_size]`` in hidden's dtype; entry i is target token ``d2t[i]``.
        """
        if self.d2t is not None and lm_head.shape[0] != len(self.d2t):
            lm_head = self.output_rows(lm_head)
        return nn.functional.linear(self.output_norm(hidden), lm_head.to(hidden.dtype))

    def output_rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        """Return the rows of the target's output weight that the head scores. The engine calls this only once."""
        return lm_head if self.d2t is None else lm_head.index_select(0, self.d2t)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Convert indices of `logits` to tokens of the target."""
        return draft_tokens if self.d2t is None else self.d2t[draft_tokens]

    def save(self, folder: str | Path) -> None:
        """Write head.json and head.safetensors; create the folder if needed."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save(folder)
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS)

    @classmethod
    def load(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DraftHead:
        """Load a head that `save` wrote, with weights in `dtype`, in eval mode and without gradients.

        Raises:
            ModelError: files are absent or damaged, or tensors do not fit the configuration.
        """
        folder = Path(folder)
        head = cls(HeadConfig.load(folder))
        file = folder / WEIGHTS
        try:
            head.load_state_dict(load_file(file))
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{file} cannot be read ({error}); save the head again") from None
        except RuntimeError as error:
            cause = " ".join(str(error).split())
            raise ModelError(f"{file} does not fit its head.json ({cause}); save both together") from None
        _check_vocabulary(head, file)
        return head.to(device=device, dtype=dtype).requires_grad_(False).eval()


def _check_vocabulary(head: DraftHead, file: Path) -> None:
    if head.d2t is None:
        return
    low, high = int(head.d2t.min()), int(head.d2t.max())
    if low < 0 or high >= head.config.vocab_size:
        raise ModelError(
            f"{file} drafts tokens {low} … {high}, but the vocabulary is 0 … {head.config.vocab_size - 1}; "
            "train it with this target's tokens"
        )
