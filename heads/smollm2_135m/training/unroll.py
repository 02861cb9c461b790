"""What a draft head learns from: batches of the target's own text, its features, and its distributions as labels.

The head is unrolled on its own outputs as it will be when it drafts (EAGLE-3's training-time test, Li et al. 2025),
and every step is held against the target's distribution, not against the token that happened to be sampled.
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
        answers: bool ``[batch, length]``, whether the token is the target's own: what a head has to guess.
    """

    tokens: torch.Tensor
    answers: torch.Tensor

    def guessed(self, steps: int) -> list[torch.Tensor]:
        """For each step, indices into ``[batch · length]`` of rows whose chain is inside one answer till then."""
        valid = pad(self.answers[:, 1:], (0, 1))
        found = []
        for step in range(steps):
            valid = valid & pad(self.answers[:, 2 + step :], (0, 2 + step))
            found.append(valid.flatten().nonzero()[:, 0])
        return found


def batches(samples: Sequence[Sample], tokens: int, rng: random.Random) -> Iterator[TextBatch]:
    """The samples in random order, about `tokens` tokens a batch.

    Samples of like length go together, so that little is padding. Every fourth batch strings four dialogues together
    in each row: a head meets longer contexts in use than one dialogue is.
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
    """Each row is its dialogues, one behind the other."""
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
    """An `AttentionStep` over whole texts: causal attention, nothing is kept."""

    def __init__(self, model: CausalLM, batch: int) -> None:
        self.batch = batch
        self.scales = [layer.softmax_scale for layer in model.layers]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Rows are text-major."""
        q, k, v = (t.unflatten(0, (self.batch, -1)).transpose(1, 2) for t in (q, k, v))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scales[layer], enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)


class ChainAttention:
    """The head's attention in the steps of one unrolled chain; see the text of `draftmark_speculative.eagle.head`.

    Step 0 is causal. In step j the row that began at p sees the step-0 rows up to p and its own rows 1 … j: causal
    over the first block of keys, and a diagonal over each block that a later step added.
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
    """The head's hidden states step by step; row p of step j guesses token p + 2 + j. All ``[batch, length, …]``."""
    attend, hidden = ChainAttention(), head.fuse(features)
    positions = torch.arange(embeddings.shape[1], device=embeddings.device)
    for step in range(steps):
        behind = pad(embeddings[:, 1 + step :], (0, 0, 0, 1 + step))
        hidden = head(behind, hidden, positions + step, attend)
        yield hidden


class SoftCrossEntropy(torch.autograd.Function):
    """Σ over rows of -Σ_v labels[v] · log softmax(hidden @ weightᵀ)[v], with the gradient taken on the way.

    The weight is frozen, so hidden's gradient is all that is needed, and no logits are kept: 16,384 rows of them would
    be a gigabyte a step.
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, chunk: int) -> torch.Tensor:
        """hidden ``[rows, size]``, weight ``[vocab, size]``, labels ``[rows, vocab]`` that need not sum to one."""
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
        """The stored gradient times what comes from above."""
        (grad,) = ctx.saved_tensors
        return (grad * above).to(grad.dtype), None, None, None


def chain_loss(
    head: DraftHead, embeddings: torch.Tensor, features: torch.Tensor, labels: torch.Tensor,
    rows: Sequence[torch.Tensor], weight: torch.Tensor, decay: float,
) -> torch.Tensor:  # fmt: skip
    """Mean cross-entropy over the steps of the chain, step j weighted by ``decay ** j``.

    Args:
        features: as the head wants them ``[batch, length, …]``.
        labels: ``[batch · length, draft vocabulary]``, the target's distribution behind each token.
        rows: of `TextBatch.guessed`, one tensor a step.
        weight: output rows of the draft vocabulary.
    """
    total = torch.zeros((), device=labels.device)
    hidden_steps = unroll(head, embeddings, features, len(rows))
    for step, (hidden, valid) in enumerate(zip(hidden_steps, rows, strict=True)):
        scored = head.output_norm(hidden.flatten(0, 1)[valid])
        loss = SoftCrossEntropy.apply(scored, weight, labels[valid + 1 + step], 4096)
        total = total + decay**step * loss / max(1, len(valid))
    return total / sum(decay**step for step in range(len(rows)))
