"""Descriptions of vLLM engines to measure, their model folders, and a process for each that frees its memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .memory import LOAD_FORMAT
from .shapes import ARCHITECTURES, SHAPES

OURS = "CUSTOM"
HEAD_OF_A_CHECKPOINT = "Eagle3DraftmarkHeadForCausalLM"
"""Architecture name that `draftmark_vllm.heads.convert` gives a draft head."""
NOT_COMPILED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
RANK = "benchmarks.vllm.ranks.Rank"
"""Worker extension of each rank of an engine with several GPUs."""
KV_DTYPES = {"auto": "bfloat16", "fp8": "float8_e4m3fn"}
"""Map from vLLM's names to torch's. "auto" is the model's dtype, which is bfloat16 in every timed engine."""
LOOK_UP = "draftmark_vllm.trees.look_up.LookUpTrees"
BLOCK_DRAFTER = "DFlashDraftModel"
BLOCK_LAYERS = 5
"""Layers of a block drafter, and number of the target's layers that it reads."""
ADAPTIVE = ", adaptive"
"""End of a drafter's name in the rows of an engine with adaptive verification."""
HEAD_VOCABULARY = 4
"""Target vocabulary divided by draft vocabulary: 128,256 / 4 = 32,064. Published heads of Llama 3 have 32,000."""


@dataclass(frozen=True)
class Engine:
    """Configuration of one engine.

    Attributes:
        shape: model shape, a key of `shapes.SHAPES`.
        backend: vLLM's name of an attention backend, or CUSTOM:NAME for one of draftmark's.
        page_size: tokens of a KV page.
        dtype: of the model.
        drafts: drafts a step; 0 for none.
        drafter: "ngram", "eagle3" for a draft head of the target's size, "dflash" for a block drafter, or "mtp"
            for the model's own layer.
        adaptive: vLLM's adaptive verification: the device decides how many drafts of each request a step verifies.
        row_cost: cost of a verified row for adaptive verification, in units of a step's fixed cost; None for vLLM's own
            measurement, in which the rows of a small model cost nothing.
        debug: draftmark checks every step and compares the ranks; each check waits for the device.
        random_weights: weights of a fixed seed are written and loaded; otherwise vLLM fills in dummy weights.
        acceptance: probability that vLLM's synthetic rejection sampler accepts a draft if it accepted those before it;
            None for the real rejection sampler.
        batches: numbers of requests of the steps that are captured as CUDA graphs.
        shared: weights and KV lie in the shared memory of a `fleet`.
        kv_bytes: bytes of the KV pages; None lets vLLM measure.
        kv_dtype: dtype of KV, a key of KV_DTYPES; the scales of fp8 are one.
        skip_prefill: requests may use KV that was not computed, see `connector`.
        checkpoint: name of a model in the folder of models, loaded instead of a shape; texts need one. Its draft
            head is the folder CHECKPOINT-head.
        shortest_ngram, longest_ngram: lengths in tokens of the n-grams that vLLM's own drafter looks up.
        trees: drafts are trees, run by the opt-in tree worker: from n-gram look-up, or combs of a draft head. Without
            drafts the same worker samples.
        temperature: of texts; 0 for greedy ones. The seed of a prompt is its number.
        also_captured: more sizes of captured steps, in rows.
        only: names of the cases that this engine runs; empty for all cases of its phases.
        packages: name of a folder in the folder of models. Its packages precede all others, for example another
            release of FlashInfer.
        environment: variables of the engine's process.
        compiled: the model is compiled by torch. Otherwise only full graphs are captured, and steps without a graph run
            eagerly; such an engine starts in half of the time, and suffices for texts.
    """

    shape: str
    backend: str
    page_size: int
    dtype: str = "bfloat16"
    drafts: int = 0
    drafter: str = "ngram"
    adaptive: bool = False
    row_cost: float | None = None
    debug: bool = False
    num_gpus: int = 1
    max_model_len: int = 8704
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    eager: bool = False
    random_weights: bool = False
    acceptance: float | None = None
    batches: tuple[int, ...] = (1, 4, 16, 64)
    shared: bool = False
    kv_bytes: int | None = None
    kv_dtype: str = "auto"
    skip_prefill: bool = False
    checkpoint: str | None = None
    trees: bool = False
    temperature: float = 0.0
    shortest_ngram: int = 1
    longest_ngram: int = 3
    also_captured: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    packages: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    compiled: bool = True

    def arguments(self, folder: Path) -> dict[str, Any]:
        """Return the arguments of vLLM's `LLM`."""
        name, _, ours = self.backend.partition(":")
        # Sizes of full graphs, and of piecewise graphs: vLLM pads uneven steps to one of these sizes.
        captured = sorted({*self.batches, *(n * (1 + self.drafts) for n in self.batches), *self.also_captured})
        graphs = {"cudagraph_capture_sizes": captured} | ({} if self.compiled else NOT_COMPILED)
        more: dict[str, Any] = {} if self.eager else {"compilation_config": graphs}
        if name == OURS and ours:
            more["additional_config"] = {"draftmark": {"backend": ours, "debug": self.debug}}
        if self.drafts:
            more["speculative_config"] = self._speculative(folder, name)
        if self.kv_bytes is not None:
            more["kv_cache_memory_bytes"] = self.kv_bytes
        if self.kv_dtype != "auto":
            more["kv_cache_dtype"] = self.kv_dtype
        if self.skip_prefill:
            from .connector import CONFIG

            more["kv_transfer_config"] = CONFIG
        if self.num_gpus > 1:
            more["worker_extension_cls"] = RANK
        if self.trees:
            more |= {"worker_cls": _tree_worker(), "async_scheduling": False}
        if self.packages:
            # The autotuner tunes no attention kernels, and it imports packages that FlashInfer itself does not need.
            more["kernel_config"] = {"enable_flashinfer_autotune": False}
        return {
            "model": str(folder / self.checkpoint if self.checkpoint else model(folder, self)),
            "load_format": LOAD_FORMAT if self.shared else "auto" if self._has_weights else "dummy",
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "attention_backend": name,
            "block_size": self.page_size,
            "tensor_parallel_size": self.num_gpus,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "enable_prefix_caching": False,
            "gpu_memory_utilization": 0.05 if self.kv_bytes else 0.85,
            "enforce_eager": self.eager,
            "disable_log_stats": True,
            **more,
        }

    def sampling(self, number: int, max_tokens: int) -> Any:
        """Return vLLM's `SamplingParams` of prompt `number`; its text always has `max_tokens` tokens."""
        from vllm import SamplingParams

        seed = {"seed": number} if self.temperature else {}
        return SamplingParams(
            temperature=self.temperature, max_tokens=max_tokens, ignore_eos=True, detokenize=False, **seed
        )

    @property
    def unusual(self) -> dict[str, Any]:
        """Fields that a row has only for some engines: drafter, adaptive verification, and an unusual KV dtype."""
        drafter = {"drafter": self.drafter + (ADAPTIVE if self.adaptive else "")} if self.drafts else {}
        drafter |= {"row_cost": self.row_cost} if self.row_cost is not None else {}
        return drafter | ({"kv_dtype": self.kv_dtype} if self.kv_dtype != "auto" else {})

    @property
    def architectures(self) -> tuple[str, ...]:
        """Architectures of the target and of the draft head, as vLLM names them."""
        target = ARCHITECTURES[SHAPES[self.shape]["model_type"]]
        if not self.drafts or self.drafter in ("ngram", "mtp"):
            return (target,)
        if self.drafter == "dflash":
            return (target, BLOCK_DRAFTER)
        return (target, HEAD_OF_A_CHECKPOINT if self.checkpoint else "LlamaForCausalLMEagle3")

    def _speculative(self, folder: Path, backend: str) -> dict[str, Any]:
        """Return the argument `speculative_config` of `LLM`."""
        config: dict[str, Any] = {"method": self.drafter, "num_speculative_tokens": self.drafts}
        if self.drafter == "ngram" and self.trees:
            config |= {"method": "custom_class", "model": LOOK_UP}
        elif self.drafter == "ngram":
            config |= {"prompt_lookup_max": self.longest_ngram, "prompt_lookup_min": self.shortest_ngram}
        elif self.drafter == "mtp":
            config["attention_backend"] = backend
        else:
            given = folder / f"{self.checkpoint}-head" if self.checkpoint else head(folder, self)
            config |= {"model": str(given), "attention_backend": backend}
        if self.adaptive:
            config["enable_adaptive_verification"] = True
        if self.acceptance is not None:
            config["rejection_sample_method"] = "synthetic"
            config["synthetic_acceptance_rates"] = [self.acceptance ** (n + 1) for n in range(self.drafts)]
        return config

    @property
    def _has_weights(self) -> bool:
        return self.random_weights or self.checkpoint is not None


def _tree_worker() -> str:
    from vllm.platforms import current_platform

    return f"draftmark_vllm.trees.{'cpu_worker.CpuTreeWorker' if current_platform.is_cpu() else 'worker.TreeWorker'}"


def model(folder: Path, engine: Engine) -> Path:
    """Write a model folder of the engine's shape, with weights only if `random_weights`; else vLLM makes dummy ones."""
    path = folder / f"{engine.shape}-{engine.dtype}"
    if not (path / "config.json").exists():
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            **SHAPES[engine.shape],
            max_position_embeddings=131072,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
            torch_dtype=engine.dtype,
            architectures=[engine.architectures[0]],
            initializer_range=0.08,
        )
        if engine.random_weights:
            import torch

            torch.manual_seed(0)
            made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            made.to(getattr(torch, engine.dtype)).save_pretrained(path)
        config.save_pretrained(path)
    return path


def head(folder: Path, engine: Engine) -> Path:
    """Write the folder of a draft head for a Llama of this shape, without weights.

    An EAGLE-3 head has one layer. With shared weights it has a smaller vocabulary and an output matrix of its own. With
    vLLM's dummy weights it has the target's vocabulary. A block drafter has `BLOCK_LAYERS` layers.
    """
    if engine.drafter == "dflash":
        return block_head(folder, engine)
    path = folder / f"{engine.shape}-{engine.dtype}-eagle3{'-shared' if engine.shared else ''}"
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        shape, layers = SHAPES[engine.shape] | {"num_hidden_layers": 1}, SHAPES[engine.shape]["num_hidden_layers"]
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            **shape,
            "model_type": "llama",
            "draft_vocab_size": shape["vocab_size"] // (HEAD_VOCABULARY if engine.shared else 1),
            # vLLM's default repeats a layer if the model is shallow, and the head would get too few hidden states.
            "eagle_aux_hidden_state_layer_ids": [1, layers // 2, layers - 1],
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "torch_dtype": engine.dtype,
            "tie_word_embeddings": False,
        }
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return path


def block_head(folder: Path, engine: Engine) -> Path:
    """Write the folder of a DFlash drafter for a model of this shape, without weights."""
    path = folder / f"{engine.shape}-{engine.dtype}-dflash"
    if not (path / "config.json").exists():
        path.mkdir(parents=True, exist_ok=True)
        shape = SHAPES[engine.shape]
        last = shape["num_hidden_layers"] - 2  # the last layer's output has no place among vLLM's features
        layers = [1 + (last - 1) * n // (BLOCK_LAYERS - 1) for n in range(BLOCK_LAYERS)]
        config = block_config(shape, BLOCK_LAYERS, layers, shape["vocab_size"] - 1, 131072, 500000.0, engine.dtype)
        (path / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return path


def block_config(
    shape: Mapping[str, Any], layers: int, read: list[int], mask: int, positions: int, theta: float, dtype: str
) -> dict[str, Any]:
    """Return the configuration of a DFlash drafter. All rows of a block see one another.

    Args:
        shape: hidden size, heads and vocabulary, which are the target's.
        read: layers of the target; their outputs are the drafter's context.
        mask: token id of a position to be drafted.
        positions, theta: largest number of positions, and base of the rotary embedding.
    """
    names = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    )  # fmt: skip
    return {
        "architectures": [BLOCK_DRAFTER],
        "model_type": "qwen3",
        **{name: shape[name] for name in names},
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "torch_dtype": dtype,
        "tie_word_embeddings": False,
        "dflash_config": {"mask_token_id": mask, "target_layer_ids": read, "causal": False},
    }


def apart(work: Callable[[Engine, Path], Any], engine: Engine, folder: Path) -> Any:
    """Run `work` in a process of its own and return its result, or a dict with `failed` if it raised.

    The process is a fork, so that vLLM is imported only once. The parent must not have initialized the device.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(work, engine, folder, send))
    process.start()
    send.close()
    try:
        found = receive.recv()
    except EOFError:
        found = {"failed": "the process ended without a result"}
    process.join()
    return found


def _child(work: Callable[[Engine, Path], Any], engine: Engine, folder: Path, send: Any) -> None:
    try:
        send.send(work(engine, folder))
    except BaseException as error:
        traceback.print_exc()
        send.send({"failed": f"{type(error).__name__}: {str(error)[-400:]}", "engine": asdict(engine)})
    send.close()
    os._exit(0)  # skips vLLM's own shutdown, which can wait for processes that have ended


def prompts(batch: int, context: int, vocabulary: int, period: int = 0) -> list[dict[str, list[int]]]:
    """Return prompts of random tokens. With a `period` the first tokens repeat, so that n-gram look-up finds drafts."""
    import random

    found = []
    for number in range(batch):
        rng = random.Random(f"{number} {context}")
        tokens = [rng.randrange(3, vocabulary) for _ in range(period or context)]
        found.append({"prompt_token_ids": (tokens * (context // len(tokens) + 1))[:context]})
    return found


def say(row: dict[str, Any]) -> None:
    """Print a row at once, because the run may be killed."""
    print("ROW", json.dumps(row), flush=True)
