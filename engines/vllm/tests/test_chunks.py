"""Tests of chunked attention (Llama 4): a row sees only its own chunk, and vLLM makes each chunk a request."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches

from draftmark import AttentionShape, HostLengthsNeed
from draftmark.lengths import Unknown
from draftmark_engines import EngineError, EngineLimits
from draftmark_vllm.bound_backends import BoundBackends
from draftmark_vllm.builder import DraftmarkBuilder
from draftmark_vllm.limits import limits_of_chunks

PAGE = 16
SHAPE = AttentionShape(4, 2, 16, PAGE, "float32", "float32")


def builder(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None, spec_chunk: int | None, debug: bool = True
) -> DraftmarkBuilder:
    """Return a builder for one layer with chunk size `chunk`, and for a KV spec with chunk size `spec_chunk`."""
    impl = SimpleNamespace(shape=lambda page_size, dtype: SHAPE, block=False)
    layer = SimpleNamespace(impl=impl, attention_chunk_size=chunk)
    monkeypatch.setattr(DraftmarkBuilder, "_layers", lambda self: [layer])
    config = SimpleNamespace(
        additional_config={"draftmark": {"backend": "reference", "debug": debug}},
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=64),
        speculative_config=None,
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        model_config=SimpleNamespace(max_model_len=256, dtype=torch.float32),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    spec = SimpleNamespace(block_size=PAGE, attention_chunk_size=spec_chunk)
    return DraftmarkBuilder(spec, ["layer"], config, torch.device("cpu"))


@pytest.mark.parametrize("seed", range(40))
def test_chunk_requests_stay_within_the_limits(seed: int) -> None:
    """The requests that vLLM makes of chunks stay within the limits, and their page tables are one chunk wide."""
    rng = random.Random(seed)
    chunk, requests = PAGE * rng.randint(1, 4), rng.randint(1, 6)
    rows = [rng.choice((0, 1, 1, 5, rng.randint(1, 150))) for _ in range(requests)]
    lens = [count + rng.randint(0, 200) for count in rows]
    start = torch.tensor([0, *rows]).cumsum(0).int()
    step = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(requests, 32, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
    )
    made, _ = make_local_attention_virtual_batches(chunk, step, PAGE)
    limits = limits_of_chunks(EngineLimits(requests, 512, sum(rows)), chunk)
    assert made.num_reqs <= limits.max_num_reqs
    assert int(made.seq_lens.max()) <= limits.max_model_len == chunk
    assert made.block_table_tensor.shape[1] == chunk // PAGE


@pytest.mark.parametrize(("chunk", "max_len"), [(None, 256), (32, 32)])
def test_builder_reads_the_chunk_from_its_layers(
    monkeypatch: pytest.MonkeyPatch, chunk: int | None, max_len: int
) -> None:
    """The builder reads the chunk size from its layers, since layers without chunked attention can share the KV spec.

    With chunks the builder reads no host lengths: up to vLLM 0.29 these are the lengths of whole requests.
    """
    made = builder(monkeypatch, chunk, 32)
    assert made._bound.any.decode_verify.max_kv_len == max_len
    assert made._host_lengths is (chunk is None)


@pytest.mark.parametrize(("rows", "chunk", "bounds"), [
    ((1, 1), None, [None]), ((1, 9), None, [(30, 32)]), ((9, 9), None, [(22, 32)]), ((9, 9), 32, [None]),
])  # fmt: skip
def test_prompts_have_host_bounds_except_in_chunks(
    monkeypatch: pytest.MonkeyPatch, rows: tuple[int, ...], chunk: int | None, bounds: list[tuple[int, ...] | None]
) -> None:
    """A backend that needs no host lengths receives upper bounds for steps with a prompt, but none for chunks."""
    made = builder(monkeypatch, chunk, chunk, debug=False)
    start = torch.tensor([0, *rows]).cumsum(0).int()
    lens = torch.tensor([30, 40], dtype=torch.int32)
    step = CommonAttentionMetadata(
        query_start_loc=start,
        query_start_loc_cpu=start,
        seq_lens=lens,
        num_reqs=2,
        num_actual_tokens=sum(rows),
        max_query_len=max(rows),
        max_seq_len=40,
        block_table_tensor=torch.ones(2, 256 // PAGE, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(rows), dtype=torch.int64),
        seq_lens_cpu_upper_bound=lens + 1,
    )
    batches = [batch for _, batch, _ in made.build(0, step).parts]
    assert [None if isinstance(one.host, Unknown) else one.host.upper_bound() for one in batches] == bounds


def test_chunks_refuse_a_backend_with_exact_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend that plans from exact lengths is refused for chunked layers; the error names the chunk and a remedy."""
    monkeypatch.setattr(BoundBackends, "need", HostLengthsNeed.EXACT, raising=False)
    monkeypatch.setattr(
        BoundBackends, "__setattr__", lambda self, name, value: name == "need" or vars(self).update({name: value})
    )
    with pytest.raises(
        EngineError, match="plans from exact lengths, but vLLM has none for layers with chunks of 32 positions; choose"
    ):
        builder(monkeypatch, 32, 32)


def test_other_layers_keep_their_limits() -> None:
    """`limits_of_chunks` does not change the limits of layers without chunked attention."""
    limits = EngineLimits(4, 512, 64)
    assert limits_of_chunks(limits, None) is limits
