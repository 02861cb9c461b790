"""Runs a vLLM engine in a forked process, and returns its results."""

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
"""Tokens of a text in Triton's interpreter."""


def token_prompts(seed: int = 1) -> list[list[int]]:
    """Return prompts for n-gram drafts: each repeats its tokens once. No length is a multiple of a page or chunk."""
    rng = random.Random(seed)
    return [2 * [rng.randrange(3, 250) for _ in range(n)] for n in (5, 20, 50, 9, 33, 61)]


@dataclass(frozen=True)
class RunResult:
    """Holds the results of one engine run.

    Attributes:
        tokens: tokens of each text.
        ahead: for each generated token, its log-probability minus the log-probability of the second best token.
        drafted, accepted: number of draft tokens in the whole run. rounds: verify steps, counted for each request.
        logprobs: log-probabilities of each text's tokens, then of each prompt's tokens if requested.
    """

    tokens: list[list[int]]
    ahead: list[list[float]]
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    logprobs: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class RunRequest:
    """Describes an engine, its arguments and its prompts; `run` runs it.

    Attributes:
        model: folder of the model. backend: draftmark backend; None for vLLM's own attention.
        prompts: token ids of each prompt. new_tokens: tokens of each text.
        logprobs: whether to return log-probabilities.
        sampling: arguments of `SamplingParams`, added to the usual ones.
        settings: draftmark's settings. environment: variables of the process.
        arguments: arguments of vLLM's `LLM`, added to the usual ones.
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

    def run(self) -> RunResult:
        """Run the engine in a fork and return its result.

        Raises:
            RuntimeError: the engine failed. The message has its traceback or exit code.
        """
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
        assert isinstance(found, RunResult)
        return found


@cache
def import_engine() -> None:
    """Import the modules that every engine needs, once, before any fork. The import takes longer than a tiny engine."""
    os.environ.update(ENVIRONMENT)
    for name in ENGINE:
        importlib.import_module(name)
    # vLLM inspects a model's class in a subprocess, to keep CUDA out of its process. On a CPU this only costs 10 s.
    importlib.import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda look: look()
    gc.collect()
    gc.freeze()  # vLLM runs the garbage collector several times at startup; frozen objects are not scanned.


def _child(request: RunRequest, send: Any) -> None:
    try:
        os.environ.update({**ENVIRONMENT, **request.environment})
        send.send(_run(request))
    except BaseException as error:
        send.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    send.close()
    os._exit(0)  # vLLM's own shutdown may wait for a process that has ended


def _run(request: RunRequest) -> RunResult:
    from vllm import LLM, SamplingParams

    ours: dict[str, Any] = {}
    if request.backend is not None:
        settings = {"backend": request.backend, "debug": True, **request.settings}
        ours = {"attention_backend": "CUSTOM", "additional_config": {"draftmark": settings}}
    llm = LLM(model=request.model, **{**USUAL, **ours, **request.arguments})
    if ours:
        _check_that_no_layer_is_vllms(llm)
    prompts = [{"prompt_token_ids": one} for one in request.prompts]
    usual = {"temperature": 0, "max_tokens": request.new_tokens, "ignore_eos": True, "detokenize": False}
    sampling = SamplingParams(**{**usual, "logprobs": 2 if request.logprobs else None, **request.sampling})
    requests = llm.generate(prompts, sampling, use_tqdm=False)
    outs = [out for request in requests for out in request.outputs]
    counts = {one.name: int(getattr(one, "value", 0)) for one in llm.get_metrics() if "spec_decode" in one.name}
    return RunResult(
        [list(out.token_ids) for out in outs],
        [[_ahead(entry) for entry in out.logprobs or ()] for out in outs],
        counts.get("vllm:spec_decode_num_draft_tokens", 0),
        counts.get("vllm:spec_decode_num_accepted_tokens", 0),
        counts.get("vllm:spec_decode_num_drafts", 0),
        [_logprobs(out.token_ids, out.logprobs) for out in outs]
        + [_logprobs(one.prompt_token_ids, one.prompt_logprobs) for one in requests],
    )


def _check_that_no_layer_is_vllms(llm: Any) -> None:
    """Check the attention layers of the model and its drafter: vLLM selects a drafter's backend separately.

    If workers are other processes, vLLM has no layers here, and nothing is checked.
    """
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    names = {name: one.get_attn_backend().get_name() for name, one in layers.items() if hasattr(one, "impl")}
    assert set(names.values()) <= {"CUSTOM"}, names


def _logprobs(tokens: Any, entries: Any) -> list[float]:
    """Return log-probabilities of tokens. A prompt's first token has none."""
    return [one[token].logprob for token, one in zip(tokens, entries or (), strict=False) if one]


def _ahead(entry: dict[int, Any]) -> float:
    best, second = sorted((one.logprob for one in entry.values()), reverse=True)[:2]
    return float(best - second)
