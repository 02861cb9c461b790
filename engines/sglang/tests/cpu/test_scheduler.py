"""Tests of SGLang's scheduler with draftmark: output tokens equal plain decoding with SGLang's own attention."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from scheduler import generate, generate_on_ranks, in_a_fork, on_a_cpu

from draftmark_sglang_judge.in_process import run_until_done, submit

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30, 40, 50, 60]]
TOKENS = 24
CHAIN = dict(speculative_eagle_topk=1, speculative_num_steps=3, speculative_num_draft_tokens=4)
TREE = dict(speculative_eagle_topk=4, speculative_num_steps=4, speculative_num_draft_tokens=12)
NGRAM = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
WIDE = dict(speculative_eagle_topk=8, speculative_num_steps=5, speculative_num_draft_tokens=40)


@pytest.fixture(scope="module")
def plain(target: str) -> list[list[int]]:
    """Output tokens of SGLang's own attention without drafts."""
    return _texts(target, attention_backend="torch_native")


def _texts(target: str, fewest_saved: int | None = None, **arguments: Any) -> list[list[int]]:
    made = in_a_fork(generate, PROMPTS, TOKENS, model_path=target, **arguments)
    if fewest_saved is not None:
        assert made["backend"] == "DraftmarkBackend"
        saved = len(PROMPTS) * TOKENS - made["verifies"]
        assert saved >= fewest_saved, f"{made['verifies']} verifications: drafts were not accepted"
    return made["texts"]


def _drafts(eagle: str) -> dict[str, Any]:
    return dict(attention_backend="draftmark", speculative_algorithm="EAGLE", speculative_draft_model_path=eagle)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_plain_decoding(page_size: int, target: str, plain: list[list[int]]) -> None:
    """Prefill and decode generate the right tokens at every page size."""
    assert _texts(target, 0, attention_backend="draftmark", page_size=page_size) == plain


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_chain(page_size: int, target: str, eagle: str, plain: list[list[int]]) -> None:
    """An EAGLE chain needs fewer target forwards than plain decoding, and the output tokens stay equal."""
    assert _texts(target, 20, page_size=page_size, **CHAIN, **_drafts(eagle)) == plain


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_tree(page_size: int, target: str, eagle: str, plain: list[list[int]]) -> None:
    """An EAGLE tree saves more target forwards than a chain, at page sizes that SGLang allows only its own backends."""
    assert _texts(target, 30, page_size=page_size, **TREE, **_drafts(eagle)) == plain


def test_wide_tree(target: str, eagle: str, plain: list[list[int]]) -> None:
    """A tree of eight branches and five steps, with over 32 nodes, leaves output tokens equal on pages of 64."""
    assert _texts(target, 40, page_size=64, **WIDE, **_drafts(eagle)) == plain


def test_branch_order(target: str, eagle: str, plain: list[list[int]]) -> None:
    """With SGLang's own choice of parents (DRAFTMARK_ANCESTORS=branch) the output tokens stay equal."""
    branch = dict(environment={"DRAFTMARK_ANCESTORS": "branch"})
    assert _texts(target, 20, page_size=16, **TREE, **_drafts(eagle), **branch) == plain


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_ngram_tree(page_size: int, target: str, plain: list[list[int]]) -> None:
    """N-gram trees need fewer target forwards than plain decoding, and the output tokens stay equal."""
    assert _texts(target, 5, attention_backend="draftmark", page_size=page_size, **NGRAM) == plain


def test_eagle3(deep_target: str, eagle3: str) -> None:
    """With an EAGLE-3 head that reads three layers and has its own vocabulary, the output tokens stay equal."""
    drafts = dict(_drafts(eagle3), speculative_algorithm="EAGLE3")
    plain = _texts(deep_target, attention_backend="torch_native")
    assert _texts(deep_target, 0, page_size=16, **TREE, **drafts) == plain


@pytest.mark.parametrize(("shape", "page_size"), [({}, 16), (CHAIN, 64), (TREE, 16)], ids=["plain", "chain", "tree"])
def test_triton_kernels(shape: dict[str, int], page_size: int, target: str, eagle: str, plain: list[list[int]]) -> None:
    """The kernels of draftmark's cuda_triton backend, in Triton's interpreter, generate the same tokens."""
    drafts = _drafts(eagle) if shape else dict(attention_backend="draftmark")
    kernels = dict(environment={"DRAFTMARK_BACKEND": "cuda_triton"})
    assert _texts(target, 0, page_size=page_size, **shape, **drafts, **kernels) == plain


def test_overlap_and_mixed_chunks(target: str) -> None:
    """With prompt chunks mixed into decode batches, and SGLang's overlapped loop, the output tokens stay equal."""
    prompts = [[5 + n, 7, 9] * 20 for n in range(4)]
    whole = in_a_fork(generate, prompts, TOKENS, model_path=target, attention_backend="torch_native")
    chunks = dict(chunked_prefill_size=32, enable_mixed_chunk=True, page_size=16)
    made = in_a_fork(generate, prompts, TOKENS, model_path=target, attention_backend="draftmark", **chunks)
    assert made["texts"] == whole["texts"]


def _idle_between(prompts: list[list[int]], max_new_tokens: int, **arguments: Any) -> dict[str, Any]:
    """Run `generate` with an idle batch before every turn of SGLang's loop, as on DP attention ranks without requests.

    The idle forward is skipped: SGLang's rotary embedding for CPUs rejects an empty batch.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    scheduler, ran = on_a_cpu(**arguments), []
    taken = inspect.signature(ForwardBatch.init_new).parameters
    fields = {name: False for name in taken if name == "return_hidden_states_before_norm"}

    def idle() -> None:
        batch, runner = scheduler.dp_attn_adapter.get_idle_batch(), scheduler.tp_worker.model_runner
        runner.attn_backend.init_forward_metadata(ForwardBatch.init_new(batch, runner, **fields))
        ran.append(batch.forward_mode.name)

    requests = submit(scheduler, prompts, max_new_tokens)
    run_until_done(scheduler, requests, idle)
    return {"texts": [list(one.output_ids)[:max_new_tokens] for one in requests], "idle": ran}


def test_idle_batches(target: str, plain: list[list[int]]) -> None:
    """Idle batches (without requests) between other batches do not change the output tokens."""
    made = in_a_fork(_idle_between, PROMPTS, TOKENS, model_path=target, attention_backend="draftmark", page_size=16)
    assert made["texts"] == plain
    assert len(made["idle"]) > 10 and set(made["idle"]) == {"IDLE"}


def test_radix_cache(target: str, eagle: str) -> None:
    """A prompt with KV in the radix cache gives the same output tokens as an uncached prompt."""
    prompts = [[11, 12, 13, 14] * 10] * 3
    plain = in_a_fork(generate, prompts, TOKENS, model_path=target, attention_backend="torch_native")
    one_by_one = dict(max_running_requests=1, page_size=16)
    made = in_a_fork(generate, prompts, TOKENS, model_path=target, **one_by_one, **TREE, **_drafts(eagle))
    assert made["texts"] == plain["texts"]


def test_sliding_window(folder: Any) -> None:
    """A model with window layers and full layers in one KV pool has two attention shapes and the right output."""
    import models

    gemma = str(models.tiny_gemma2(folder / "gemma2"))
    prompts = [[5, 7, 9, 11] * 10, [3, 4] * 20]
    plain = in_a_fork(generate, prompts, TOKENS, model_path=gemma, attention_backend="torch_native")
    made = in_a_fork(generate, prompts, TOKENS, model_path=gemma, attention_backend="draftmark", page_size=16, **NGRAM)
    assert made["windows"] == [-1, 16]
    assert made["texts"] == plain["texts"]


def _in_two_pools(*arguments: Any, **named: Any) -> dict[str, Any]:
    """Run `generate` with SGLang's two KV pools for window and full layers, and count the slots freed in the second."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    # SGLang 0.5.20 and later free tokens that left the window with `free_swa_segment`, older releases with `free_swa`.
    way = "free_swa_segment" if hasattr(SWATokenToKVPoolAllocator, "free_swa_segment") else "free_swa"
    derive, free = ModelConfig._derive_hybrid_model, getattr(SWATokenToKVPoolAllocator, way)
    freed = []

    def two_pools(self: Any) -> None:
        self.disable_hybrid_swa_memory = False
        derive(self)

    def counted(self: Any, slots: Any, **where: Any) -> None:
        freed.append(len(slots))
        free(self, slots, **where)

    ModelConfig._derive_hybrid_model = two_pools
    setattr(SWATokenToKVPoolAllocator, way, counted)
    return generate(*arguments, **named) | dict(freed=sum(freed))


@pytest.mark.parametrize(("page_size", "drafts"), [(1, NGRAM), (16, {}), (16, NGRAM)], ids=["1", "16-plain", "16"])
def test_second_pool_for_window_layers(page_size: int, drafts: dict[str, Any], folder: Any) -> None:
    """With window layers in a second KV pool, which frees tokens that left the window, output tokens stay equal."""
    import models

    gemma = str(models.tiny_gemma2(folder / "gemma2"))
    hybrid = str(models.tiny_gemma2(folder / "hybrid", is_hybrid_swa=True, hybrid_layer_pattern=[1, 0]))
    prompts = [[5 + n, 7, 9, 11] * (10 + n) for n in range(6)]
    plain = in_a_fork(generate, prompts, TOKENS, model_path=gemma, attention_backend="torch_native")
    served = dict(model_path=hybrid, attention_backend="draftmark", page_size=page_size)
    # With these limits the pools differ in size, so a token has different slots in the two pools.
    served |= dict(max_total_tokens=1536, swa_full_tokens_ratio=0.25)
    made = in_a_fork(_in_two_pools, prompts, TOKENS, **served, **drafts)
    assert made["texts"] == plain["texts"]
    assert made["freed"] >= 16, "nothing left the window"


def test_two_ranks(target: str, eagle: str, plain: list[list[int]]) -> None:
    """With tensor parallelism, both ranks run the same forwards and generate the right tokens."""
    guarded = dict(environment={"DRAFTMARK_GUARD": "1"})
    made = generate_on_ranks(2, PROMPTS, TOKENS, model_path=target, page_size=16, **TREE, **_drafts(eagle), **guarded)
    assert [one["texts"] for one in made] == [plain, plain]
    assert [one["heads"] for one in made] == [[(2, 1)], [(2, 1)]]
    assert [one["steps_compared"] for one in made] == [made[0]["steps_compared"]] * 2
    assert made[0]["steps_compared"] > 10
    assert all(len(PROMPTS) * TOKENS - one["verifies"] >= 30 for one in made)


def _longer_on_rank_1(*arguments: Any, rank: int, **named: Any) -> dict[str, Any]:
    from draftmark_sglang.prefixes import Prefixes

    write = Prefixes.write

    def longer(self: Any, batch: Any, counted: int) -> None:
        write(self, batch, counted)
        batch.prefix_lens.add_(rank)

    Prefixes.write = longer
    return generate(*arguments, rank=rank, **named)


def test_different_ranks_are_reported(target: str) -> None:
    """If the lengths on one tensor-parallel rank are off by one, every rank raises an error that names this rank."""
    served = dict(model_path=target, page_size=16, attention_backend="draftmark")
    guarded = dict(environment={"DRAFTMARK_GUARD": "1"}, function=_longer_on_rank_1)
    with pytest.raises(RuntimeError, match="ranks 1 differ from rank 0 in the prefix lengths"):
        generate_on_ranks(2, PROMPTS, TOKENS, **served, **guarded)


def test_fp8_kv(target: str, eagle: str) -> None:
    """With an fp8 (e4m3) KV cache, decoding with a draft tree generates the same tokens as decoding without drafts."""
    kernels = {"DRAFTMARK_BACKEND": "cuda_triton"}
    served = dict(model_path=target, page_size=16, kv_cache_dtype="fp8_e4m3", environment=kernels)
    try:
        decoded = in_a_fork(generate, PROMPTS, TOKENS, attention_backend="draftmark", **served)
    except RuntimeError as error:
        if "FP8 KV cache requires Intel AMX" in str(error):
            pytest.skip("this SGLang keeps no fp8 KV on a CPU without AMX")
        raise
    made = in_a_fork(generate, PROMPTS, TOKENS, **served, **TREE, **_drafts(eagle))
    assert decoded["kv_dtypes"] == made["kv_dtypes"] == ["float8_e4m3fn"]
    assert made["texts"] == decoded["texts"]
    assert len(PROMPTS) * TOKENS - made["verifies"] >= 20
