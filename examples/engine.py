"""A small engine that decodes with draft trees over draftmark's public API and compares its tokens with plain decoding.

    python examples/engine.py

It needs no download and no GPU: the model has two layers and random weights. docs/one-step.md explains the steps.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode, load
from draftmark.runtime import (
    BatchBuffers,
    ForwardBatch,
    KVPool,
    SequenceLengths,
    VerifyResult,
    commit_round,
    ragged,
    validate,
)

DEVICE = torch.device("cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz "  # token t is letter t
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, LAYERS, CONTEXT = 4, 2, 16, 64, 2, 160
PARENTS = (-1, 0, 1, 2, 0, 4)  # the draft tree: the root, a branch of three guesses, a branch of two guesses
PROMPTS = ("the cat sat on the mat and ", "one two one two one ", "speculation pays when drafts are right ")
Attention = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (layer, q, k, v) -> [rows, heads]


class Model:
    """A decoder with random weights: attention layers between an embedding and an output projection."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(82)
        self.embedding = torch.randn(len(LETTERS), HIDDEN, generator=random)
        self.position = torch.randn(CONTEXT, HIDDEN, generator=random) / 8
        self.qkv = torch.randn(LAYERS, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM, generator=random) / HIDDEN**0.5
        self.out = torch.randn(LAYERS, HEADS * HEAD_DIM, HIDDEN, generator=random) / HIDDEN**0.5
        self.head = torch.randn(HIDDEN, len(LETTERS), generator=random)

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Return the most likely next token of each row, int64 ``[rows]``."""
        hidden = self.embedding[tokens] + self.position[positions]
        for layer in range(LAYERS):
            heads = (hidden @ self.qkv[layer]).view(len(tokens), -1, HEAD_DIM)
            q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            hidden = torch.nn.functional.layer_norm(hidden + attention(layer, q, k, v) @ self.out[layer], (HIDDEN,))
        return (hidden @ self.head).argmax(-1)


def draft(text: list[int]) -> list[int]:
    """Return the tree's tokens: the text's newest token, then two continuations that followed it earlier."""
    branches: list[list[int]] = []
    for at in range(len(text) - 2, -1, -1):
        if text[at] == text[-1] and text[at + 1] not in [branch[0] for branch in branches]:
            branches.append(text[at + 1 : at + 4])
    first, second = [*branches, [], []][:2]
    return [text[-1], *(first + [-1] * 3)[:3], *(second + [-1] * 2)[:2]]  # -1: no guess; verification rejects it


class Engine:
    """Decodes a batch of prompts greedily, one forward a round."""

    def __init__(self, model: Model, num_reqs: int, backend: str = "reference") -> None:
        self.model = model
        self.geometry = Geometry.create(
            AttentionShape(HEADS, KV_HEADS, HEAD_DIM, page_size=8, q_dtype="float32", kv_dtype="float32"),
            Limits(max_num_reqs=num_reqs, max_context_len=CONTEXT),
            DraftShape(topk=2, num_draft_tokens=len(PARENTS)),
        )
        loaded = load(backend)
        self.backend = loaded.open(self.geometry, DEVICE)
        self.tree_ops = loaded.tree_ops(self.geometry, DEVICE)
        null_pages = self.geometry.null_pages(loaded.requirements(self.geometry).unique_slots)
        num_pages = null_pages + num_reqs * self.geometry.max_pages_per_req
        self.pool = KVPool(self.geometry, LAYERS, num_pages, null_pages, DEVICE)
        self.free_pages = list(range(null_pages, num_pages))
        self.page_table = torch.zeros(num_reqs, self.geometry.max_pages_per_req, dtype=torch.int32)
        self.lengths = SequenceLengths(num_reqs, self.geometry.max_prefix_len, DEVICE)
        self.buffers = BatchBuffers(self.geometry, DEVICE)

    def forward(self, batch: ForwardBatch, tokens: torch.Tensor) -> torch.Tensor:
        """Run the model over one batch; return the target's token after each row."""
        validate(batch, self.geometry)
        self.backend.plan(batch)
        self.backend.write_metadata(batch)

        def attention(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, cache = torch.empty(q.shape), self.pool.layers[layer]
            self.backend.write_kv(k, v, cache, batch)
            self.backend.attend(q, cache, batch, out)
            return out.flatten(1)

        return self.model(tokens.clamp(min=0), batch.positions, attention)

    def prefill(self, texts: list[list[int]], new_tokens: int) -> None:
        """Reserve pages, store the KV of every prompt, and append the first generated token to each text."""
        rows, q_lens = list(range(len(texts))), tuple(len(text) for text in texts)
        for row, length in zip(rows, q_lens, strict=True):
            for column in range(self.geometry.pages_for(length + new_tokens, self.geometry.max_tail)):
                self.page_table[row, column] = self.free_pages.pop()
        batch = ragged(self.geometry, self.lengths.device[rows], self.page_table, q_lens, self.lengths.exact(rows))
        targets = self.forward(batch, torch.tensor([token for text in texts for token in text]))
        for text, last in zip(texts, (batch.q_indptr[1:] - 1).tolist(), strict=True):
            text.append(int(targets[last]))
        self.commit(batch, None, rows)

    def batch(self, mode: Mode, rows: list[int]) -> ForwardBatch:
        """Fill the static buffers with the requests' lengths and pages; return a batch over them."""
        host = self.lengths.exact(rows)
        batch = self.buffers.uniform(mode, 0, len(rows), len(rows), host, tree=mode is Mode.VERIFY)
        batch.prefix_lens.copy_(self.lengths.device[rows])
        batch.page_table.copy_(self.page_table[rows])
        return batch

    def decode_round(self, rows: list[int], texts: list[list[int]]) -> None:
        """Decode one token a request, without drafts."""
        batch = self.batch(Mode.DECODE, rows)
        self.tree_ops.write_tail(batch)
        targets = self.forward(batch, torch.tensor([texts[row][-1] for row in rows]))
        for row, token in zip(rows, targets.tolist(), strict=True):
            texts[row].append(token)
        self.commit(batch, None, rows)

    def verify_round(self, rows: list[int], texts: list[list[int]]) -> tuple[torch.Tensor, VerifyResult]:
        """Verify one draft tree a request in a single forward; append the accepted tokens to the texts."""
        drafts = torch.tensor([draft(texts[row]) for row in rows])
        parents = torch.tensor([PARENTS] * len(rows))
        batch = self.batch(Mode.VERIFY, rows)
        self.tree_ops.write_tail(batch, parents)
        targets = self.forward(batch, drafts.flatten()).view_as(drafts)
        result = self.tree_ops.verify_tree(drafts, parents, targets)
        for row, tokens, count in zip(rows, result.tokens.tolist(), result.accept_lens.tolist(), strict=True):
            texts[row] += tokens[:count]
        self.commit(batch, result, rows)
        return drafts, result

    def commit(self, batch: ForwardBatch, result: VerifyResult | None, rows: list[int]) -> None:
        """End a round: move accepted KV and advance the lengths on the device, then record the counts on the host."""
        at_most = max(batch.q_lens)
        self.lengths.dispatched(rows, at_most)
        commit_round(batch, result, self.lengths, torch.tensor(rows), kv=((self.tree_ops, self.pool),))
        counts = batch.q_indptr.diff() if result is None else result.accept_lens
        self.lengths.settle(rows, counts.tolist(), at_most)


def generate(prompts: list[list[int]], new_tokens: int, *, drafts: bool, show: int = 0) -> tuple[list[list[int]], int]:
    """Return each prompt's new tokens and the number of rounds; print the first `show` rounds of request 0."""
    engine, texts, rounds = Engine(Model(), len(prompts)), [list(prompt) for prompt in prompts], 0
    wanted = [len(prompt) + new_tokens for prompt in prompts]
    engine.prefill(texts, new_tokens)
    while running := [row for row, text in enumerate(texts) if len(text) < wanted[row]]:
        rounds += 1
        if not drafts:
            engine.decode_round(running, texts)
            continue
        trees, result = engine.verify_round(running, texts)
        if rounds <= show:
            count = int(result.accept_lens[0])
            slots, emitted = result.accept_index[0, :count].tolist(), letters(result.tokens[0, :count])
            print(f"round {rounds}: tree '{letters(trees[0])}', accepted slots {slots}, emitted '{emitted}'")
    return [text[len(prompt) : end] for text, prompt, end in zip(texts, prompts, wanted, strict=True)], rounds


def letters(tokens: torch.Tensor) -> str:
    """Write tokens as letters, and a missing guess (-1) as a dot."""
    return "".join("." if token < 0 else LETTERS[token] for token in tokens.tolist())


def main() -> None:
    """Decode the prompts with and without drafts and compare the tokens."""
    prompts = [[LETTERS.index(letter) for letter in prompt] for prompt in PROMPTS]
    speculative, rounds = generate(prompts, 64, drafts=True, show=3)
    plain, plain_rounds = generate(prompts, 64, drafts=False)
    equal = sum(one == other for one, other in zip(speculative, plain, strict=True))
    print(f"{rounds} rounds with drafts, {plain_rounds} without; {equal} of {len(prompts)} texts equal")


if __name__ == "__main__":
    main()
