"""Tests of hybrid models: with chains and trees, tokens equal those of transformers' plain decoding."""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
from any_model import use_random_weights
from hybrids import (
    allow_prefix_caches,
    decoded,
    stand_in_for_a_gpu,
    tiny_falcon_h1,
    tiny_kimi_linear,
    tiny_qwen3_next,
)
from scheduler import generate, generate_on_ranks, in_a_fork, on_a_cpu

from draftmark import Gate, Recurrence
from draftmark_sglang_judge.in_process import run_until_done, submit

PROMPTS = [[3, 5, 7, 9, 11, 13, 15], [2, 4, 6], [9] * 20, [10, 20, 30, 40, 50, 60]]
TOKENS = 24
MTP = dict(speculative_algorithm="EAGLE")
CHAIN = dict(MTP, speculative_eagle_topk=1, speculative_num_steps=3, speculative_num_draft_tokens=4)
TREE = dict(MTP, speculative_eagle_topk=4, speculative_num_steps=3, speculative_num_draft_tokens=10)
NGRAM = dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=8)
WINDOWS = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""SGLang rounds windows to bfloat16 by default, and transformers does not."""


@pytest.fixture(scope="module")
def qwen(folder: Path) -> Path:
    """Folder of a tiny Qwen3-Next with an MTP layer."""
    return in_a_fork(tiny_qwen3_next, folder / "qwen3_next")


@pytest.fixture(scope="module")
def plain(qwen: Path) -> list[list[int]]:
    """Output tokens of transformers for the Qwen3-Next."""
    return in_a_fork(decoded, qwen, PROMPTS, TOKENS)


def _generate(before: Any = None, prompts: list[list[int]] = PROMPTS, **arguments: Any) -> dict[str, Any]:
    stand_in_for_a_gpu()
    if before is not None:
        before()
    named = dict(attention_backend="draftmark", disable_radix_cache=True, environment=WINDOWS) | arguments
    return generate(prompts, TOKENS, **named)


@pytest.mark.parametrize(
    ("page_size", "drafts", "fewest_saved"),
    [(1, {}, 0), (16, CHAIN, 10), (1, TREE, 20), (64, TREE, 20), (16, NGRAM, 4)],
    ids=["1-plain", "16-chain", "1-tree", "64-tree", "16-ngram"],
)
def test_gated_delta_net(
    qwen: Path, plain: list[list[int]], page_size: int, drafts: dict[str, Any], fewest_saved: int
) -> None:
    """Without drafts, with MTP chains and trees, and with n-gram trees, a Qwen3-Next generates the right tokens."""
    made = in_a_fork(_generate, model_path=str(qwen), page_size=page_size, **drafts)
    assert (made["state_shape"].recurrence, made["state_shape"].gate) == (Recurrence.DELTA, Gate.HEAD)
    assert made["texts"] == plain
    saved = len(PROMPTS) * TOKENS - made["verifies"] if drafts else 0
    assert saved >= fewest_saved, f"{made['verifies']} verifications: drafts were not accepted"


def test_chunks_among_decodes(qwen: Path) -> None:
    """Prompts in chunks, which share batches with decodes, leave the state that a whole prompt leaves."""
    prompts = [[5 + n, 7, 9] * (20 + n) for n in range(4)]
    chunks = dict(chunked_prefill_size=32, enable_mixed_chunk=True, page_size=16)
    made = in_a_fork(_generate, None, prompts, model_path=str(qwen), **chunks)
    assert made["texts"] == in_a_fork(decoded, qwen, prompts, TOKENS)


def _commit_nothing() -> None:
    from draftmark_sglang.state_layers import StateLayers

    StateLayers.commit = lambda *_: None


def test_states_that_do_not_follow_the_drafts_are_seen(qwen: Path, plain: list[list[int]]) -> None:
    """Without the commits of recurrent states the tokens differ, so the other tests compare them."""
    made = in_a_fork(_generate, _commit_nothing, model_path=str(qwen), page_size=16, **TREE)
    assert made["texts"] != plain


def test_guarded_calls(qwen: Path, plain: list[list[int]]) -> None:
    """With DRAFTMARK_GUARD=1 the state backend refuses no call: order, slots, parents, save slots."""
    guarded = dict(environment=WINDOWS | {"DRAFTMARK_GUARD": "1"})
    made = in_a_fork(_generate, model_path=str(qwen), page_size=16, **TREE, **guarded)
    assert made["texts"] == plain


def _on_a_rank(prompts: list[list[int]], tokens: int, **arguments: Any) -> dict[str, Any]:
    return _generate(**arguments)


def test_two_ranks(qwen: Path, plain: list[list[int]]) -> None:
    """With tensor parallelism each rank has half of the heads of a state, and both generate the right tokens."""
    guarded = dict(environment=WINDOWS | {"DRAFTMARK_GUARD": "1"}, function=_on_a_rank)
    made = generate_on_ranks(2, PROMPTS, TOKENS, model_path=str(qwen), page_size=16, **TREE, **guarded)
    assert [one["texts"] for one in made] == [plain, plain]
    assert [one["state_shape"].num_heads for one in made] == [2, 2]


@pytest.mark.parametrize("drafts", [{}, TREE], ids=["plain", "tree"])
def test_triton_kernels(qwen: Path, plain: list[list[int]], drafts: dict[str, Any]) -> None:
    """The state kernels of cuda_triton, in Triton's interpreter, generate the same tokens over SGLang's slots."""
    kernels = dict(environment=WINDOWS | {"DRAFTMARK_STATE_BACKEND": "cuda_triton"})
    assert in_a_fork(_generate, model_path=str(qwen), page_size=16, **drafts, **kernels)["texts"] == plain


@pytest.mark.parametrize("drafts", [{}, NGRAM], ids=["plain", "ngram"])
def test_mamba2(folder: Path, drafts: dict[str, Any]) -> None:
    """A Falcon-H1, with Mamba2 and attention in each layer, generates the right tokens, plain and with n-gram trees."""
    path = folder / "falcon_h1"
    if not path.exists():
        in_a_fork(tiny_falcon_h1, path)
    made = in_a_fork(_generate, model_path=str(path), page_size=16, **drafts)
    assert made["state_shape"].recurrence is Recurrence.DECAY
    assert made["texts"] == in_a_fork(decoded, path, PROMPTS, TOKENS)


def test_kda(folder: Path) -> None:
    """A Kimi-Linear, with KDA and MLA, decodes what its prefill computes, and n-gram trees give the same tokens.

    Neither transformers 5.12 nor SGLang on a CPU has KDA, so the first half of each text moves to the prompt.
    """
    served = dict(model_path=tiny_kimi_linear(folder / "kimi"), load_format="dummy")
    made = in_a_fork(_generate, use_random_weights, **served)
    assert made["state_shape"].gate is Gate.KEY
    longer = [prompt + text[: TOKENS // 2] for prompt, text in zip(PROMPTS, made["texts"], strict=True)]
    again = in_a_fork(_generate, use_random_weights, longer, page_size=16, **served)["texts"]
    assert [one[: TOKENS // 2] for one in again] == [one[TOKENS // 2 :] for one in made["texts"]]
    assert in_a_fork(_generate, use_random_weights, page_size=16, **served, **NGRAM)["texts"] == made["texts"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kda", "mamba2"])
def test_triton_kernels_of_other_families(folder: Path, family: str) -> None:
    """The state kernels of cuda_triton, in Triton's interpreter, run KDA and Mamba2 in n-gram trees.

    SGLang stores the windows of KDA with channels last, which is a stride for the kernels.
    """
    if family == "kda":
        served = dict(model_path=tiny_kimi_linear(folder / "slow_kimi"), load_format="dummy")
    else:
        served = dict(model_path=str(in_a_fork(tiny_falcon_h1, folder / "slow_falcon")))
    before = use_random_weights if family == "kda" else None
    plain = in_a_fork(_generate, before, **served)["texts"]
    kernels = dict(environment=WINDOWS | {"DRAFTMARK_STATE_BACKEND": "cuda_triton"})
    assert in_a_fork(_generate, before, page_size=16, **served, **kernels, **NGRAM)["texts"] == plain


BASE = [(7 * n * n + 3 * n) % 90 + 3 for n in range(150)]
FIRST = [*BASE, 5, 6]
SHARED = [FIRST, FIRST, BASE[:130] + [9] * 40, [*FIRST, *[11] * 70], [*BASE[:70], 4, 2]]


def _serve_one_by_one(
    qwen: Path, prompts: list[list[int]], before: Any = allow_prefix_caches, **arguments: Any
) -> list[tuple[list[int], int]]:
    """Return the tokens of each prompt, and how many prompt tokens the prefix cache had."""
    for one in (stand_in_for_a_gpu, allow_prefix_caches, before):
        one()
    kept = dict(mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=64, environment=WINDOWS)
    named = kept | dict(model_path=str(qwen), attention_backend="draftmark", max_running_requests=1)
    scheduler = on_a_cpu(**named, **arguments)
    requests = submit(scheduler, prompts, TOKENS)
    run_until_done(scheduler, requests)
    return [(list(one.output_ids)[:TOKENS], one.cached_tokens) for one in requests]


@pytest.mark.parametrize(("page_size", "drafts"), [(16, {}), (16, TREE)], ids=["plain", "tree"])
def test_prefix_cache(qwen: Path, page_size: int, drafts: dict[str, Any]) -> None:
    """Prompts that resume at a checkpoint of the state give the right tokens.

    SGLang keeps checkpoints inside prompts, and at multiples of the interval that decoding or a verified tree crosses.
    """
    first = in_a_fork(decoded, qwen, [FIRST], 48)[0]
    prompts = [FIRST, *SHARED[1:], FIRST + first[:TOKENS] + [5, 6], [9, 8] * 20]
    made = in_a_fork(_serve_one_by_one, qwen, prompts, page_size=page_size, **drafts)
    assert [tokens for tokens, _ in made] == in_a_fork(decoded, qwen, prompts, TOKENS)
    assert [cached for _, cached in made][1:4] == [128, 128, 128] and made[5][1] >= 128


def _as_replayed() -> None:
    """Pass the backend of a decode or a verification only the fields that SGLang's graph runner passes it."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.runner import decode_cuda_graph_runner

    from draftmark_sglang.backend import DraftmarkBackend

    prepare, made = DraftmarkBackend.init_forward_metadata_out_graph, decode_cuda_graph_runner.build_replay_fb_view

    def prepare_replay(self: Any, forward: Any, in_capture: bool = False) -> None:
        if not (forward.forward_mode.is_decode() or forward.forward_mode.is_target_verify()):
            return prepare(self, forward, in_capture)
        count, rows = forward.batch_size, len(forward.input_ids)
        kept = SimpleNamespace(encoder_lens=None, **{name: getattr(forward, name, None) for name in REPLAYED})
        given = dict(forward_batch=forward, buffers=kept, bs=count, raw_bs=count, num_tokens=rows, seq_len_fill_value=1)
        given |= dict(capture_forward_mode=forward.forward_mode, is_encoder_decoder=False, global_num_tokens_cpu=None)
        view = made(**{name: given[name] for name in signature(made).parameters})
        return prepare(self, view, in_capture)

    DraftmarkBackend.init_forward_metadata_out_graph = prepare_replay


REPLAYED = ("input_ids", "positions", "req_pool_indices", "seq_lens", "seq_lens_cpu", "mamba_track_indices")
"""Fields of SGLang's static buffers from which it makes the view of a batch that a graph replays."""


@pytest.mark.parametrize("drafts", [{}, TREE], ids=["plain", "tree"])
def test_view_of_a_replayed_batch(qwen: Path, drafts: dict[str, Any]) -> None:
    """The fields of SGLang's view of a batch that a graph replays suffice, also for checkpoints."""
    prompts = [FIRST, [*FIRST, 5]]
    made = in_a_fork(_serve_one_by_one, qwen, prompts, _as_replayed, page_size=16, **drafts)
    assert [tokens for tokens, _ in made] == in_a_fork(decoded, qwen, prompts, TOKENS)


def _pool(qwen: Path, **arguments: Any) -> tuple[bool, int]:
    """Serve with 1 GiB for states and KV; return whether the pool has states of draft tokens, and its slots."""
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

    stand_in_for_a_gpu()
    allow_prefix_caches()
    KVCacheConfigurator._profile_available_bytes = lambda self, _: int(self._handle_max_mamba_cache(1.0) * (1 << 30))
    named = dict(model_path=str(qwen), attention_backend="draftmark", environment=WINDOWS, max_running_requests=2048)
    scheduler = on_a_cpu(**named, **arguments)
    pool = scheduler.tp_worker.model_runner.req_to_token_pool.mamba_pool
    return hasattr(pool.mamba_cache, "intermediate_ssm"), pool.size


def test_no_state_is_kept_for_a_draft_token(qwen: Path) -> None:
    """With drafts SGLang's pool has no states of draft tokens, and most of the slots that it has without drafts."""
    (_, slots), (snapshots, slots_with_drafts) = (in_a_fork(_pool, qwen, **one) for one in ({}, TREE))
    assert not snapshots
    # SGLang's own formula gives a third of the slots: one slot has 10 / 5 states of draft tokens in addition.
    assert 0.85 * slots < slots_with_drafts < slots
