"""Accepted length of draft trees over known greedy answers, from the head without the engine.

The target's text and features are known, so a round needs no forward of the target. At each place the head
drafts the tree that the engine would draft, and the text shows the path that the target would keep. Rounds follow each
other as in the engine. They equal the engine's rounds in float32 (`held_out --check`), in a fraction of the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from draftmark_speculative.eagle import DraftHead, dense_attention
from draftmark_speculative.eagle.tree_builder import DraftTreeBuilder, best_tokens
from draftmark_speculative.models import CausalLM

from .text import Sample
from .unroll import DenseForward

Shape = tuple[int, int, int]
"""Tuple of topk, num_steps and num_draft_tokens."""


class Place:
    """Holds the head's outputs over a whole text, computed from the target's features.

    Attributes:
        hidden: ``[length - 1, hidden_size]``; row p predicts token p + 2.
    """

    def __init__(self, model: CausalLM, head: DraftHead, sample: Sample) -> None:
        self.model, self.head, self.rows = model, head, head.output_rows(model.lm_head)
        tokens = torch.tensor(sample.tokens, device=model.device)
        positions = torch.arange(len(tokens), device=model.device)
        taps = model.tap(head.config.feature_layers)
        _, features = model.forward_features(tokens, positions, DenseForward(model, 1), taps, positions[-1:])
        fused = head.fuse(features[:-1].to(self.rows.dtype))
        self.hidden = head(model.embed(tokens[1:])[None], fused[None], positions[:-1], self._keep)[0]

    def _keep(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.keys, self.values = k[0], v[0]
        return dense_attention(q, k, v)

    def tree(self, row: int, shape: Shape) -> tuple[list[int], list[int]]:
        """Return tokens and parents of the tree rooted at token ``row + 1``, which is node 0."""
        return self.tree_with_chances(row, shape)[:2]

    def tree_with_chances(self, row: int, shape: Shape) -> tuple[list[int], list[int], list[float]]:
        """Return the tree of `tree`, and the probability of each node given that its parent is kept; 1 for the root."""
        topk, steps, nodes = shape
        scores, tokens = self._best(self.hidden[row : row + 1], topk)
        growth = DraftTreeBuilder(scores, tokens)
        hidden = self.hidden[row].expand(1, topk, -1)
        keys, values = [self.keys[: row + 1]], [self.values[: row + 1]]
        for step in range(steps - 1):
            parents = growth.place()[0].tolist()
            seen = _ancestors(parents)[-topk:]

            def attend(q, k, v, seen=seen):
                keys.append(k)
                values.append(v)
                return _attend(q, torch.cat(keys), torch.cat(values), seen)

            position = torch.full((topk,), row + 1 + step, device=hidden.device)
            hidden = self.head(self.model.embed(growth.tokens[0]), hidden[0], position, attend)
            scores, tokens = self._best(hidden, topk)
            growth.extend(scores[None], tokens[None])
            hidden = hidden[None].gather(1, growth.parents[:, :, None].expand(-1, -1, hidden.shape[-1]))
        found, above, chances, _ = growth.best_with_chances(nodes - 1)
        return [-1, *found[0].tolist()], [-1, *above[0].tolist()], [1.0, *chances[0].tolist()]

    def _best(self, hidden: torch.Tensor, topk: int) -> tuple[torch.Tensor, torch.Tensor]:
        scores, indices = best_tokens(self.head.logits(hidden, self.rows), topk)
        return scores, self.head.target_tokens(indices)


@torch.no_grad()
def tree_acceptance(
    model: CausalLM, head: DraftHead, samples: Sequence[Sample], shapes: Sequence[Shape]
) -> dict[Shape, Counter[int]]:
    """Return a histogram per shape: rounds by number of kept tokens, the target's own token included."""
    kept: dict[Shape, Counter[int]] = {shape: Counter() for shape in shapes}
    for sample in samples:
        place = Place(model, head, sample)
        for shape in shapes:
            row, last = sample.prompt_len - 1, len(sample.tokens) - 2
            while row < last:
                drafts = _walk(*place.tree(row, shape), sample.tokens[row + 2 :])
                count = min(drafts + 1, last - row)  # the last round may yield a token after the end of the text
                kept[shape][count] += 1
                row += count
    return kept


def mean(kept: Counter[int]) -> float:
    """Return the mean number of tokens per round."""
    return sum(n * count for n, count in kept.items()) / kept.total()


def _walk(tokens: list[int], parents: list[int], text: Sequence[int]) -> int:
    node = 0
    for depth, wanted in enumerate(text):
        children = [i for i in range(1, len(tokens)) if parents[i] == node and tokens[i] == wanted]
        if not children:
            return depth
        node = children[0]
    return len(text)


def _ancestors(parents: list[int]) -> torch.Tensor:
    """Return bool ``[slots, slots]``: the draft slots that each slot sees, itself included; parent -1 is the root."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for slot, parent in enumerate(parents):
        if parent >= 0:
            seen[slot] |= seen[parent]
    return seen


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Compute attention of draft rows over all committed keys, and over the draft keys that `seen` marks."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    mask[:, len(k) - seen.shape[1] :] = seen.to(q.device)
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)
