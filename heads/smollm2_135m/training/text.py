"""Text that the target writes itself: large batches of prompts over a dense cache, with one captured graph a step.

Training needs plain sampling in large batches only, so this does not use the engine. Every request starts at the same
column of a dense cache, and no request joins or leaves. The target runs through `CausalLM.forward`, as in the engine.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from draftmark_speculative.models import CausalLM


@dataclass(frozen=True)
class Sample:
    """A prompt and the target's answer to it.

    Attributes:
        tokens: prompt and answer; the answer's last token is a stop token, unless the answer was cut.
        prompt_len: number of tokens of the prompt.
        temperature: sampling temperature of the answer; 0 is greedy.
    """

    tokens: tuple[int, ...]
    prompt_len: int
    temperature: float

    @property
    def answer(self) -> tuple[int, ...]:
        """Tokens of the answer."""
        return self.tokens[self.prompt_len :]


class DenseCache:
    """An `AttentionStep` over a dense cache ``[layers, batch, heads, columns, head_dim]``.

    Prompts are padded on the left to one width, so all requests write the same column.
    """

    def __init__(self, model: CausalLM, batch: int, columns: int) -> None:
        layer = model.layers[0]
        shape = (len(model.layers), batch, layer.num_kv_heads, columns, layer.head_dim)
        self.k = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self.v = torch.zeros_like(self.k)
        self.scale = layer.softmax_scale
        self.starts = torch.zeros(batch, dtype=torch.int64, device=model.device)
        self.column = torch.zeros(1, dtype=torch.int64, device=model.device)
        self.columns = torch.arange(columns, device=model.device)
        self.seen = columns
        """Number of columns that a decode step reads; `column` is below it."""
        self.part = slice(0, batch)
        """Requests of the current forward."""

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store KV and attend. Rows are request-major: one per request in decode, the prompt's width in prefill."""
        batch = self.part.stop - self.part.start
        q, k, v = (t.unflatten(0, (batch, -1)).transpose(1, 2) for t in (q, k, v))
        out = self._decode(layer, q, k, v) if q.shape[2] == 1 else self._prefill(layer, q, k, v)
        return out.transpose(1, 2).flatten(0, 1)

    def _prefill(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        width = q.shape[2]
        self.k[layer, self.part, :, :width] = k
        self.v[layer, self.part, :, :width] = v
        at = self.columns[:width]
        mask = (at <= at[:, None]) & (at >= self.starts[self.part, None, None])
        mask = mask | (at == at[:, None])  # a padding row without keys would give NaN
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        out: torch.Tensor = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask[:, None], scale=self.scale
        )
        return out

    def _decode(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.k[layer].index_copy_(2, self.column, k)
        self.v[layer].index_copy_(2, self.column, v)
        keys, values = self.k[layer, :, :, : self.seen], self.v[layer, :, :, : self.seen]
        at = self.columns[: self.seen]
        hidden = (at > self.column) | (at < self.starts[:, None])
        grouped = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)  # [batch, kv heads, group, head_dim]
        scores = (grouped @ keys.transpose(2, 3)).float() * self.scale
        weights = scores.masked_fill(hidden[:, None, None], -torch.inf).softmax(-1).to(values.dtype)
        return (weights @ values).flatten(1, 2).unsqueeze(2)


class Writer:
    """Sampler of answers to batches of prompts. All batches share its tensors and graphs."""

    def __init__(self, model: CausalLM, batch: int, width: int, new_tokens: int, stop: Sequence[int]) -> None:
        self.model, self.batch, self.width, self.new_tokens = model, batch, width, new_tokens
        device = model.device
        self._cache = DenseCache(model, batch, width + new_tokens)
        self._token = torch.zeros(batch, dtype=torch.int64, device=device)
        self._step = torch.zeros(1, dtype=torch.int64, device=device)
        self._out = torch.zeros(batch, new_tokens, dtype=torch.int64, device=device)
        self._done = torch.zeros(batch, dtype=torch.bool, device=device)
        self._temperature = torch.zeros(batch, 1, device=device)
        self._stop = torch.tensor(list(stop), device=device)
        self._graphs: dict[int, Any] = {}

    @torch.inference_mode()
    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], most: int | None = None
    ) -> list[Sample]:
        """Generate answers to at most `batch` prompts of at most `width` tokens, with `most` new tokens for each."""
        unwritten = 1 - len(prompts) / self.batch
        assert len(prompts) <= self.batch and max(map(len, prompts)) <= self.width
        filled = [*prompts, *[prompts[0]] * (self.batch - len(prompts))]
        heat = [*temperatures, *[0.0] * (self.batch - len(prompts))]
        self._temperature.copy_(torch.tensor(heat)[:, None])
        self._done.copy_(torch.arange(self.batch) >= len(prompts))
        self._prefill(filled)
        for step in range(1, min(most or self.new_tokens, self.new_tokens)):
            if step % 16 == 0 and self._done.float().mean().item() > unwritten + 0.97 * (1 - unwritten):
                break
            self._advance(step)
        answers = self._out[: len(prompts)].tolist()
        stop, written = set(self._stop.tolist()), int(self._step.item())
        return [
            Sample((*prompt, *_until(answer[:written], stop)), len(prompt), float(temperature))
            for prompt, answer, temperature in zip(prompts, answers, temperatures, strict=True)
        ]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        cache, width = self._cache, self.width
        padded = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self._token.device)
        cache.starts.copy_(torch.tensor([width - len(p) for p in prompts]))
        self._step.zero_()
        cache.column.fill_(width)
        logits = []
        for first in range(0, self.batch, 256):  # the activations of all rows at once would not fit in memory
            cache.part = slice(first, min(first + 256, self.batch))
            ids = padded[cache.part]
            positions = (cache.columns[:width] - cache.starts[cache.part, None]).clamp(min=0)
            last = torch.arange(1, len(ids) + 1, device=ids.device) * width - 1
            logits.append(self.model.forward(ids.reshape(-1), positions.reshape(-1), cache, last))
        cache.part = slice(0, self.batch)
        self._take(torch.cat(logits))

    def _advance(self, step: int) -> None:
        """Run one step with a graph for the columns that it reads: a multiple of 64, at least the number needed."""
        columns = self.width + self.new_tokens
        seen = min(-(-(self.width + step) // 64) * 64, columns)
        if self._token.device.type != "cuda":
            self._body(seen)
            return
        if seen in self._graphs:
            self._graphs[seen].replay()
        else:
            self._graphs[seen] = self._capture(seen)

    def _capture(self, seen: int) -> Any:
        """Run the step once outside the graph, which initialises libraries, then capture it without running it."""
        self._body(seen)
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            self._body(seen)
        return graph

    def _body(self, seen: int) -> None:
        """Compute one token of every request. Captured."""
        self._cache.seen = seen
        positions = self._cache.column - self._cache.starts
        logits = self.model.forward(self._token, positions, self._cache)
        self._cache.column.add_(1)
        self._take(logits)

    def _take(self, logits: torch.Tensor) -> None:
        """Sample a token for each request with the Gumbel-max trick (argmax at temperature 0), and store it."""
        noise = -torch.empty_like(logits).exponential_().clamp(min=1e-20).log()
        chosen = (logits + self._temperature * noise).argmax(-1)
        self._token.copy_(chosen)
        self._out.index_copy_(1, self._step, chosen[:, None])
        self._done.logical_or_((chosen[:, None] == self._stop).any(1))
        self._step.add_(1)


def chat(model: CausalLM, texts: Sequence[str]) -> list[list[int]]:
    """Return token ids of each text as a user's turn in the model's chat template, ready for the answer."""
    tokenizer: Any = model.tokenizer
    turns = [[{"role": "user", "content": text}] for text in texts]
    chats = [tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True) for turn in turns]
    ids: list[list[int]] = tokenizer(chats, add_special_tokens=False)["input_ids"]
    return ids


def laid_end_to_end(texts: Sequence[Sequence[int]], first: int, length: int) -> tuple[int, ...]:
    """Return `length` tokens of the concatenated `texts`, cyclically from text `first` on."""
    turns = itertools.cycle([*texts[first:], *texts[:first]])
    return tuple(itertools.islice((token for turn in turns for token in turn), length))


def own_prompts(writer: Writer, count: int) -> list[list[int]]:
    """Return prompts that the target samples as the user's turn (the method of Magpie, Xu et al. 2024)."""
    [example] = chat(writer.model, ["\0"])
    [mark] = writer.model.tokenizer(["\0"], add_special_tokens=False)["input_ids"]
    at = next(i for i in range(len(example)) if example[i : i + len(mark)] == mark)
    before, after = example[:at], example[at + len(mark) :]
    found: dict[tuple[int, ...], None] = {}
    while len(found) < count:
        samples = writer.write([before] * writer.batch, [1.0] * writer.batch, 64)
        turns = [s.answer[:-1] for s in samples if s.answer[-1] == after[0]]
        new = {t: None for t in turns if 4 <= len(t) <= writer.width - len(before) - len(after)}
        if not new:
            raise RuntimeError(
                f"none of {writer.batch} sampled user turns ended within 64 tokens; use a model with a chat template"
            )
        found.update(new)
    return [[*before, *turn, *after] for turn in list(found)[:count]]


def write_all(
    writer: Writer, prompts: Iterator[Sequence[int]], temperatures: Sequence[float], seconds: float
) -> list[Sample]:
    """Write answers in batches, at least one, until the time or the prompts run out; temperatures rotate in a batch."""
    samples: list[Sample] = []
    start = time.perf_counter()
    while not samples or time.perf_counter() - start < seconds:
        batch = list(itertools.islice(prompts, writer.batch))
        if not batch:
            break
        heat = [temperatures[i % len(temperatures)] for i in range(len(batch))]
        samples += writer.write(batch, heat)
        took, tokens = time.perf_counter() - start, sum(len(s.answer) for s in samples)
        print(f"  {len(samples)} answers, {tokens} tokens, {tokens / took:.0f} tokens/s", flush=True)
    return samples


def frequent_tokens(samples: Sequence[Sample], count: int, model: CausalLM) -> tuple[torch.Tensor, float]:
    """Return the answers' `count` most frequent tokens, ascending, and the share of the answers that they cover."""
    seen = Counter(token for sample in samples for token in sample.answer)
    seen.update(dict.fromkeys(model.stop_token_ids, 1))
    best = seen.most_common(count)
    spare = (token for token in range(model.vocab_size) if token not in seen)
    tokens = [token for token, _ in best]
    tokens += itertools.islice(spare, count - len(tokens))
    return torch.tensor(sorted(tokens)), sum(n for _, n in best) / seen.total()


def _until(tokens: Sequence[int], stop: set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop), len(tokens))
    return list(tokens[:end])
