"""One vLLM engine in a process of its own: what it says of prompts."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import random
import traceback
from dataclasses import dataclass, field
from functools import cache
from typing import Any

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_HOST_IP": "127.0.0.1",
}
ENGINE = (
    "transformers",
    "vllm.entrypoints.llm",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
)
USUAL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "disable_log_stats": False,
    "seed": 0,
}
NEW_TOKENS = 24
SLOW_NEW_TOKENS = 8
"""Of what Triton's interpreter runs."""


def token_prompts(seed: int = 1) -> list[list[int]]:
    """Prompts of other lengths than pages and chunks have, each twice over, so that n-gram drafts find something."""
    rng = random.Random(seed)
    return [2 * [rng.randrange(3, 250) for _ in range(n)] for n in (5, 20, 50, 9, 33, 61)]


@dataclass(frozen=True)
class Said:
    """What an engine said.

    Attributes:
        tokens: of every prompt. ahead: of each token how much its log-probability passes the next best.
        drafted, accepted: tokens, over the whole run. rounds: in which a request brought drafts.
        logprobs: of each token, then of each prompt's where they were asked for.
    """

    tokens: list[list[int]]
    ahead: list[list[float]]
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    logprobs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Asked:
    """An engine and what it is asked.

    `arguments` are vLLM's own, beside those that every test has, and `sampling` its `SamplingParams`; `settings` are
    draftmark's.
    """

    model: str
    backend: str | None = None
    prompts: Any = field(default_factory=token_prompts)
    new_tokens: int = NEW_TOKENS
    logprobs: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def run(self) -> Said:
        """Run it in a fork, and raise RuntimeError with what went wrong."""
        import_engine()
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(self, send))
        process.start()
        send.close()
        try:
            found = receive.recv()
            process.join()
        except EOFError:
            process.join()
            found = f"the process ended without a result, with exit code {process.exitcode}"
        if isinstance(found, str):
            raise RuntimeError(found)
        assert isinstance(found, Said)
        return found


@cache
def import_engine() -> None:
    """Import what every engine needs, once in front of all forks: it takes longer than a tiny engine does."""
    os.environ.update(ENVIRONMENT)
    for name in ENGINE:
        importlib.import_module(name)
    # vLLM looks at a model's class in a process of its own, for CUDA's sake: on a CPU that is ten seconds for nothing.
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()
    gc.collect()
    gc.freeze()  # vLLM collects garbage several times a start, and there is none in what was imported


def _child(asked: Asked, send: Any) -> None:
    try:
        os.environ.update({**ENVIRONMENT, **asked.environment})
        send.send(_said(asked))
    except BaseException as error:
        send.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    send.close()
    os._exit(0)  # vLLM's own shutdown may wait for what is gone


def _said(asked: Asked) -> Said:
    from vllm import LLM, SamplingParams

    ours: dict[str, Any] = {}
    if asked.backend is not None:
        settings = {"backend": asked.backend, "debug": True, **asked.settings}
        ours = {"attention_backend": "CUSTOM", "additional_config": {"draftmark": settings}}
    llm = LLM(model=asked.model, **{**USUAL, **ours, **asked.arguments})
    prompts = [{"prompt_token_ids": one} for one in asked.prompts]
    usual = {"temperature": 0, "max_tokens": asked.new_tokens, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(**{**usual, "logprobs": 2 if asked.logprobs else None, **asked.sampling})
    requests = llm.generate(prompts, sampling, use_tqdm=False)
    outs = [out for request in requests for out in request.outputs]
    counts = {one.name: int(getattr(one, "value", 0)) for one in llm.get_metrics() if "spec_decode" in one.name}
    return Said(
        [list(out.token_ids) for out in outs],
        [[_ahead(entry) for entry in out.logprobs or ()] for out in outs],
        counts.get("vllm:spec_decode_num_draft_tokens", 0),
        counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        counts.get("vllm:spec_decode_num_drafts", 0),
        [_logprobs(out.token_ids, out.logprobs) for out in outs]
        + [_logprobs(one.prompt_token_ids, one.prompt_logprobs) for one in requests],
    )


def _logprobs(tokens: Any, entries: Any) -> list[float]:
    """Of tokens that have one; the first of a prompt has none."""
    return [one[token].logprob for token, one in zip(tokens, entries or (), strict=False) if one]


def _ahead(entry: dict[int, Any]) -> float:
    best, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
    return float(best - second)
