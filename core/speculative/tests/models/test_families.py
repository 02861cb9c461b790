"""The seven families over paged attention, against transformers' own generate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import draftmark
from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.batch import BatchBuffers, ForwardBatch, ragged
from draftmark.cache import KVPool
from draftmark.graphs import RecordedGraph
from draftmark.lengths import Exact, Unknown
from draftmark_speculative.models import CausalLM, LayerAttention
from draftmark_speculative.models.tiny import FAMILIES, WINDOW, tiny_model

WINDOWED = ("mistral", "gemma2", "gemma3_text")
PROMPTS = (23, 5, 14)
"""Ragged, two of them longer than the window."""
NEW_TOKENS = 24


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors are faster on one thread, by far when the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Driver:
    """Decodes a few prompts together: chunked EXTEND, then DECODE. One reference backend per distinct layer."""

    def __init__(self, model: CausalLM, layers: tuple[LayerAttention, ...] | None = None, page_size: int = 4) -> None:
        self.model, layers = model, layers or model.layers
        limits = Limits(max_num_reqs=len(PROMPTS), max_context_len=64, max_extend_tokens=24)
        reference = draftmark.load("reference")
        self.backends, self.pools = {}, {}
        for layer in dict.fromkeys(layers):
            geometry = Geometry.create(_shape(layer, page_size), limits, DraftShape())
            self.backends[layer] = reference.open(geometry, "cpu", guard=True)
            pages = 1 + len(PROMPTS) * geometry.max_pages_per_req
            self.pools[layer] = KVPool(geometry, len(layers), pages, 1, "cpu")
            self.pools[layer].k[:, 1:] = self.pools[layer].v[:, 1:] = float("nan")
        self.layers, self.geometry = layers, geometry
        self.buffers = BatchBuffers(geometry, "cpu")
        pages_each = geometry.max_pages_per_req
        self.table = (1 + torch.randperm(len(PROMPTS) * pages_each)).int().view(len(PROMPTS), pages_each)
        self.lens = [0] * len(PROMPTS)

    def attend(self, layer: int, q: Any, k: Any, v: Any) -> Any:
        """The `AttentionStep`."""
        backend, cache = self.backends[self.layers[layer]], self.pools[self.layers[layer]].layers[layer]
        out = torch.empty_like(q)
        backend.write_kv(k, v, cache, self.batch)
        backend.attend(q, cache, self.batch, out)
        return out

    def extend(self, prompts: list[list[int]], chunk: int = 7) -> Any:
        """Prefill in chunks; float32 logits of each prompt's last token."""
        last = [None] * len(prompts)
        while any(n < len(p) for n, p in zip(self.lens, prompts, strict=True)):
            q_lens = tuple(min(chunk, len(p) - n) for n, p in zip(self.lens, prompts, strict=True))
            prefix = torch.tensor(self.lens, dtype=torch.int32)
            batch = ragged(self.geometry, prefix, self.table, q_lens, Exact(tuple(self.lens)))
            tokens = [t for p, n, q in zip(prompts, self.lens, q_lens, strict=True) for t in p[n : n + q]]
            owners = [i for i, q in enumerate(q_lens) if q]
            ends = batch.q_indptr[1:].long()[owners] - 1
            logits = self.forward(batch, torch.tensor(tokens), ends)
            self.lens = [n + q for n, q in zip(self.lens, q_lens, strict=True)]
            for row, i in enumerate(owners):
                last[i] = logits[row]
        return torch.stack(last)

    def decode_batch(self, host: Any = None) -> ForwardBatch:
        """A DECODE batch over the static buffers, filled with the current lengths."""
        self.buffers.page_table[: len(self.lens)] = self.table
        self.buffers.prefix_lens[: len(self.lens)] = torch.tensor(self.lens)
        self.buffers.positions[: len(self.lens)] = torch.tensor(self.lens)
        n = len(self.lens)
        return self.buffers.uniform(Mode.DECODE, 0, n, n, host or Exact(tuple(self.lens)), tree=False)

    def forward(self, batch: ForwardBatch, tokens: Any, rows: Any = None) -> Any:
        """Plan and run one forward."""
        for backend in self.backends.values():
            backend.plan(batch)
        return self.body(batch, tokens, rows)

    def body(self, batch: ForwardBatch, tokens: Any, rows: Any = None) -> Any:
        """The capturable part."""
        self.batch = batch
        for backend in self.backends.values():
            backend.write_metadata(batch)
        return self.model.forward(tokens, batch.positions, self, rows)

    def generate(self, prompts: list[list[int]]) -> tuple[list[list[int]], Any]:
        """Greedy tokens of each prompt, and logits ``[prompts, NEW_TOKENS, vocab]``."""
        logits = [self.extend(prompts)]
        while len(logits) < NEW_TOKENS:
            logits.append(self.forward(self.decode_batch(), logits[-1].argmax(-1)))
            self.lens = [n + 1 for n in self.lens]
        stacked = torch.stack(logits, 1)
        return stacked.argmax(-1).tolist(), stacked


def _shape(layer: LayerAttention, page_size: int) -> AttentionShape:
    return AttentionShape(
        layer.num_qo_heads,
        layer.num_kv_heads,
        layer.head_dim,
        page_size,
        "float32",
        "float32",
        layer.softmax_scale,
        layer.window_left,
        layer.logits_soft_cap,
    )


def _prompts(model: CausalLM, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, model.vocab_size, (n,), generator=generator).tolist() for n in PROMPTS]


def _transformers(model: CausalLM, prompts: list[list[int]]) -> tuple[list[list[int]], Any]:
    """Greedy tokens and raw logits of transformers' own generate, prompt by prompt."""
    logits = []
    for prompt in prompts:
        out = model.hf.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            do_sample=False,
            use_cache=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
        logits.append(torch.cat(out.logits))
    stacked = torch.stack(logits).float()
    return stacked.argmax(-1).tolist(), stacked


def _error(got: Any, want: Any) -> float:
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_decodes_as_transformers_does(family: str, seed: int) -> None:
    """Ragged prompts together, chunked and paged: the same tokens, and logits equal to rounding."""
    model = tiny_model(family, seed)
    prompts = _prompts(model, seed)
    with torch.inference_mode():
        got, logits = Driver(model).generate(prompts)
    want, own = _transformers(model, prompts)
    assert got == want, f"{family} seed {seed}: {got} is not {want}"
    assert _error(logits, own) < 1e-4
    assert all(len(set(text)) >= 8 for text in got), f"degenerate text makes this test vacuous: {got}"


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("window_left", [-1, WINDOW, WINDOW - 2], ids=["none", "one more", "one less"])
def test_a_wrong_window_is_seen(family: str, window_left: int) -> None:
    """The control: with another window the same driver gives other logits, so the equality above is not vacuous."""
    model = tiny_model(family)
    wrong = tuple(
        replace(layer, window_left=layer.window_left if layer.window_left < 0 else window_left)
        for layer in model.layers
    )
    _assert_different(model, wrong)


def test_a_dropped_soft_cap_is_seen() -> None:
    """The control for the cap."""
    model = tiny_model("gemma2")
    _assert_different(model, tuple(replace(layer, logits_soft_cap=0.0) for layer in model.layers))


def _assert_different(model: CausalLM, layers: tuple[LayerAttention, ...]) -> None:
    assert layers != model.layers
    prompts = _prompts(model)
    with torch.inference_mode():
        got, logits = Driver(model, layers).generate(prompts)
    want, own = _transformers(model, prompts)
    assert got != want
    assert _error(logits[:, 0], own[:, 0]) > 1e-2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_recorded_forward_replays_as_eager(family: str, mode: Callable[[], Any]) -> None:
    """No host read in any family's forward, and nothing of a step is baked into its graph."""
    model = tiny_model(family)
    with mode():
        driver = Driver(model)
        logits = driver.extend(_prompts(model))
        tokens = torch.zeros(len(PROMPTS), dtype=torch.int64)
        batch = driver.decode_batch(Unknown(len(PROMPTS), driver.geometry.max_prefix_len))
        for backend in driver.backends.values():
            backend.plan(batch)
        graph = RecordedGraph(lambda: driver.body(batch, tokens))
        for _ in range(6):
            tokens.copy_(logits.argmax(-1))
            driver.decode_batch()
            graph.replay()
            logits = graph.outputs.clone()
            assert torch.equal(logits, driver.body(batch, tokens))
            driver.lens = [n + 1 for n in driver.lens]


def test_only_the_named_rows_get_logits() -> None:
    """logits_rows picks rows in its own order; all rows are the default."""
    model = tiny_model("llama")
    with torch.inference_mode():
        every = _one_extend(model, None)
        some = _one_extend(model, torch.tensor([9, 2]))
    assert every.shape == (sum(PROMPTS) - 20, model.vocab_size) and every.dtype == torch.float32
    torch.testing.assert_close(some, every[[9, 2]])


def _one_extend(model: CausalLM, rows: Any) -> Any:
    driver = Driver(model)
    lens = tuple(n if n < 20 else n - 20 for n in PROMPTS)
    batch = ragged(driver.geometry, torch.zeros(3, dtype=torch.int32), driver.table, lens, Exact((0, 0, 0)))
    tokens = torch.arange(sum(lens)) % model.vocab_size
    return driver.forward(batch, tokens, rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_wrap_and_answer_in_float32(dtype: str) -> None:
    """The probe's tolerance fits the dtype; logits come out as float32 whatever the weights are."""
    model = tiny_model("gemma2", dtype=dtype)
    assert model.dtype is getattr(torch, dtype)
    assert model.layers == tiny_model("gemma2").layers
