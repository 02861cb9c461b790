"""Training data and loss of a draft head: batches of the target's own text, features, and distributions as labels.

The head is unrolled on its own outputs, as it runs when it drafts (EAGLE-3's training-time test, Li et al. 2025). Every
step is trained on the target's distribution, not on the token that happened to be sampled.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from draftmark_speculative.eagle import DraftHead, dense_attention
from draftmark_speculative.models import CausalLM

from .text import Sample


@dataclass(frozen=True)
class TextBatch:
    """Rows of text, on the host.

    Attributes:
        tokens: int64 ``[batch, length]``, padded on the right with 0; length is a multiple of 16.
        answers: bool ``[batch, length]``, True for the target's own tokens, which a head must guess.
    """

    tokens: torch.Tensor
    answers: torch.Tensor

    def guessed(self, steps: int) -> list[torch.Tensor]:
        """Return for each step the indices into ``[batch · length]`` of rows with a chain still inside one answer."""
        valid = pad(self.answers[:, 1:], (0, 1))
        found = []
        for step in range(steps):
            valid = valid & pad(self.answers[:, 2 + step :], (0, 2 + step))
            found.append(valid.flatten().nonzero()[:, 0])
        return found


def batches(samples: Sequence[Sample], tokens: int, rng: random.Random) -> Iterator[TextBatch]:
    """Yield the samples in random order, about `tokens` tokens per batch.

    Samples of similar length go together, which limits padding. In every fourth batch each row concatenates four
    dialogues, because in use a head meets contexts longer than one dialogue.
    """
    order = sorted(samples, key=lambda s: len(s.tokens) + rng.random() * 32)
    groups, start = [], 0
    while start < len(order):
        joined = 4 if len(groups) % 4 == 3 else 1
        longest = joined * (len(order[start].tokens) + 40)
        rows = max(1, tokens // longest)
        groups.append((order[start : start + rows * joined], joined))
        start += rows * joined
    rng.shuffle(groups)
    for group, joined in groups:
        yield collate([group[i : i + joined] for i in range(0, len(group), joined)])


def collate(rows: Sequence[Sequence[Sample]]) -> TextBatch:
    """Make a batch in which each row is the concatenation of its dialogues."""
    length = -(-max(sum(len(sample.tokens) for sample in row) for row in rows) // 16) * 16
    tokens = torch.zeros(len(rows), length, dtype=torch.int64)
    answers = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        at = 0
        for sample in row:
            end = at + len(sample.tokens)
            tokens[i, at:end] = torch.tensor(sample.tokens)
            answers[i, at + sample.prompt_len : end] = True
            at = end
    return TextBatch(tokens, answers)


class DenseForward:
    """An `AttentionStep` over whole texts: causal attention without a cache."""

    def __init__(self, model: CausalLM, batch: int) -> None:
        self.batch = batch
        self.scales = [layer.softmax_scale for layer in model.layers]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute causal attention; rows are text-major."""
        q, k, v = (t.unflatten(0, (self.batch, -1)).transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scales[layer], enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class ChainAttention:
    """Computes the head's attention in the steps of one unrolled chain; see `draftmark_speculative.eagle.head`.

    Step 0 is causal. In step j, the row that began at p sees the step-0 rows up to p and its own rows of steps 1 … j.
    So the mask is causal over the first block of keys, and diagonal over the block of each later step.
    """

    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []
        self._masks: list[torch.Tensor] = []

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        repeat, length = q.shape[-2] // k.shape[-2], k.shape[-3]
        self._keys.append(k.repeat_interleave(repeat, -2))
        self._values.append(v.repeat_interleave(repeat, -2))
        if not self._masks:
            self._masks = [torch.ones(length, length, dtype=torch.bool, device=q.device).tril()]
            return dense_attention(q, k, v)
        self._masks.append(torch.eye(length, dtype=torch.bool, device=q.device))
        hidden = torch.cat(self._masks, 1).logical_not()
        bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
        q, keys, values = (t.transpose(1, 2) for t in (q, torch.cat(self._keys, 1), torch.cat(self._values, 1)))
        return scaled_dot_product_attention(q, keys, values, attn_mask=bias).transpose(1, 2)


def unroll(head: DraftHead, embeddings: torch.Tensor, features: torch.Tensor, steps: int) -> Iterator[torch.Tensor]:
    """Yield each step's hidden states ``[batch, length, hidden_size]``; row p of step j guesses token p + 2 + j."""
    attend, hidden = ChainAttention(), head.fuse(features)
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)
    for step in range(steps):
        following = pad(embeddings[:, 1 + step :], (0, 0, 0, 1 + step))
        hidden = head(following, hidden, positions + step, attend)
        yield hidden


class SoftCrossEntropy(torch.autograd.Function):
    """Σ over rows of -Σ_v labels[v] · log softmax(hidden @ weightᵀ)[v]; its gradient is computed in the forward.

    The weight is frozen, so only hidden's gradient is needed and no logits are kept: 16,384 rows of logits would take a
    gigabyte a step.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return the loss of hidden ``[rows, size]``, weight ``[vocab, size]`` and labels ``[rows, vocab]``.

        Labels need not sum to one.
        """
        loss = torch.zeros((), device=hidden.device)
        grad = torch.empty_like(hidden)
        for first in range(0, len(hidden), chunk):
            part = slice(first, first + chunk)
            target = labels[part].float()
            logits = (hidden[part] @ weight.T).float()
            log_q = logits.log_softmax(-1)
            loss -= (target * log_q).sum()
            pull = log_q.exp_().mul_(target.sum(-1, keepdim=True)).sub_(target)
            grad[part] = pull.to(weight.dtype) @ weight
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    def backward(ctx, above: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """Return the stored gradient times the incoming gradient."""
        (grad,) = ctx.saved_tensors
        return (grad * above).to(grad.dtype), None, None, None


def chain_loss(
    head: DraftHead, embeddings: torch.Tensor, features: torch.Tensor, labels: torch.Tensor,
    rows: Sequence[torch.Tensor], weight: torch.Tensor, decay: float,
) -> torch.Tensor:  # fmt: skip
    """Return the mean cross-entropy over the steps of the chain, with weight ``decay ** j`` for step j.

    Args:
        features: inputs of `DraftHead.fuse`, ``[batch, length, …]``.
        labels: ``[batch · length, draft vocabulary]``, the target's distribution after each token.
        rows: indices from `TextBatch.guessed`, one tensor a step.
        weight: output rows of the draft vocabulary.
    """
    total = torch.zeros((), device=labels.device)
    hidden_steps = unroll(head, embeddings, features, len(rows))
    for step, (hidden, valid) in enumerate(zip(hidden_steps, rows, strict=True)):
        scored = head.output_norm(hidden.flatten(0, 1)[valid])
        loss = SoftCrossEntropy.apply(scored, weight, labels[valid + 1 + step], 4096)
        total = total + decay**step * loss / max(1, len(valid))
    return total / sum(decay**step for step in range(len(rows)))
