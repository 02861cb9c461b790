"""The draft head: one decoder layer that guesses what the target will say next.

For whoever trains one. A **row** of the head stands at a position p of a request and is made of two things:

* the **feature** of position p: what the target computed when it processed token p, i.e. its hidden states
  ``feature_layers`` at p, side by side, ``[num_features · hidden_size]``; and
* the **embedding of token p + 1** by the target's own input embedding.

From them, and through attention over the rows of positions 0 … p, it predicts **token p + 2**. So for a text
``t[0], …, t[n-1]`` and the target's features ``f[0], …, f[n-1]``::

    inputs    e[p] = embed(t[p + 1]), f[p], position p       p = 0 … n - 3
    label     t[p + 2], or better the target's own distribution there: its logits at position p + 1

Rotary positions are p (the feature's), in training as in decoding. While drafting there are no features of the target
beyond the newest committed token, so the head reads **its own output** instead: `forward` returns a hidden state
``[hidden_size]`` that takes the place of `fuse`'s result in the next row. A head that is to draft S tokens deep
should be trained on its own outputs too (EAGLE-3 calls this training-time test)::

    g = head.fuse(features)                                 # from the target: [.., hidden_size]
    g = head(embed(tokens_shifted_by_1), g, positions, attend)   # predicts p + 2; g is the feature of position p + 1
    g = head(embed(tokens_shifted_by_2), g, positions + 1, attend)   # predicts p + 3, and so on
    logits = head.logits(g, target_lm_head_weight)

In step j ≥ 1 of that chain the row of position p + j sees the step-0 rows of positions 0 … p (made from the target's
features) and its own chain's rows of steps 1 … j, since those are what the KV cache holds in decoding; `attend` decides
that. `dense_attention` is plain causal attention for step 0.

Attention goes through the callable `attend(q, k, v) -> out`. A trainer passes dense attention over
``[batch, rows, heads, head_dim]``; the engine passes its paged cache over ``[rows, heads, head_dim]``. `q` and `k` are
rotated already; the scale is head_dim ** -0.5; grouped-query.

The head owns neither an embedding nor an output layer: both are the target's (`CausalLM.embed`, `CausalLM.lm_head`).
With a **reduced draft vocabulary** it scores only the ``draft_vocab_size`` rows of the output layer that `d2t` names
(draft token i is target token ``d2t[i]``): set `head.d2t` before training, it is saved with the weights.

Files: a folder with head.json (`HeadConfig`) and head.safetensors, written by `save`, read by `load`. Weights may be
stored in bfloat16 or float32; `load` converts.
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
    """The module's text says what it computes. Capturable: no host read, no shape that depends on data.

    Attributes:
        d2t: int64 ``[draft_vocab_size]``, the target token of each draft token; None for the whole vocabulary.
    """

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        # One feature is used as it is, so that the head's own output can be of the same kind.
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
        """What the head's one attention layer needs, as a `CausalLM` tells of its own."""
        c = self.config
        return (LayerAttention(c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.head_dim**-0.5),)

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.fc.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.fc.weight.device

    def pack(self) -> DraftHead:
        """Compute q, k and v in one product from now on, and gate and up. For decoding, behind the last `to`."""
        a, inner = self.attention, self.config.intermediate_size
        kernels = elementwise(self.fc.weight, a.num_q, a.num_kv, a.head_dim, inner)
        self.attention.pack(kernels)
        self.mlp.pack(kernels)
        return self

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features of the target ``[…, num_features · hidden_size]`` → ``[…, hidden_size]``."""
        fused: torch.Tensor = features if self.feature_proj is None else self.feature_proj(features)
        return fused

    def forward(
        self, embeddings: torch.Tensor, fused: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Run one decoder layer over rows.

        Args:
            embeddings: ``[…, rows, hidden_size]``, of the token *behind* each row's position.
            fused: like embeddings; `fuse` of the target's features, or this function's own result of the row before.
            positions: int64 ``[…, rows]`` or ``[rows]``, of the features.
            attend: the attention; called once.

        Returns:
            like embeddings: the hidden state that `logits` scores and that the next draft step takes for `fused`.
        """
        x = fused + self.fc(torch.cat((self.embed_norm(embeddings), self.feature_norm(fused)), -1))
        x = x + self.attention(self.attention_norm(x), positions, attend)
        hidden: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return hidden

    def logits(self, hidden: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
        """Score the next-but-one token.

        Args:
            hidden: ``[…, hidden_size]``, from `forward`.
            lm_head: the target's output weight ``[vocab_size, hidden_size]``, or `output_rows` of it.

        Returns:
            ``[…, draft_vocab_size or vocab_size]`` in hidden's dtype; entry i is target token ``d2t[i]``.
        """
        if self.d2t is not None and lm_head.shape[0] != len(self.d2t):
            lm_head = self.output_rows(lm_head)
        return nn.functional.linear(self.output_norm(hidden), lm_head.to(hidden.dtype))

    def output_rows(self, lm_head: torch.Tensor) -> torch.Tensor:
        """The rows of the target's output weight that the head scores: gathered once, by whoever decodes."""
        return lm_head if self.d2t is None else lm_head.index_select(0, self.d2t)

    def target_tokens(self, draft_tokens: torch.Tensor) -> torch.Tensor:
        """Indices into `logits` → tokens of the target."""
        return draft_tokens if self.d2t is None else self.d2t[draft_tokens]

    def save(self, folder: str | Path) -> None:
        """Write head.json and head.safetensors; makes the folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save(folder)
        tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in self.state_dict().items()}
        save_file(tensors, folder / WEIGHTS)

    @classmethod
    def load(
        cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> DraftHead:
        """Read what `save` wrote, with weights converted to `dtype`, in eval mode and without gradients.

        Raises:
            ModelError: absent or damaged files, or tensors that do not fit the configuration.
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
