"""Compares texts of chains and trees with plain decoding in SGLang: equal, or different at a near tie.

A row also counts the tokens that transformers' fp32 model does not choose (`off`), so plain decoding is checked too.

    python -m benchmarks.sglang.texts OUT.json [--seconds N] [--ranks N] [--servers 0,1] [--latent | --hybrid …]

With several ranks, a server is tensor parallel with one GPU per rank. All ranks must give equal texts, and
DRAFTMARK_GUARD=1 compares the forwards of the ranks. The model is a small Llama with an EAGLE head; with ``--latent``
a small DeepSeek V3, with ``--hybrid`` a small Qwen3-Next, and its MTP layer drafts. Only for hybrid models: `--check`
compares each recurrent layer of each forward with float64 (`state_check`), and `--cached` serves every prompt twice, in
chunks of 128 tokens; the second time it resumes at a checkpoint of the state.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from draftmark_sglang_judge.in_process import run_until_done, scheduler_of, submit

from .arguments import NGRAM_COMPILER, ON_A_CPU, drafting
from .cases import Case, ngram, plain, tree16, tree48
from .cases import chain as chain_of
from .guessable import VOCABULARY, write_guessable
from .guessable_hybrid import write_hybrid
from .guessable_latent import write_latent
from .imports import import_sglang
from .state_check import StateCheck

TOKENS = 96
LENGTHS = (7, 20, 64, 65, 130, 200, 320, 511)
SERVED = (
    ("draftmark", plain(64)),
    ("draftmark", tree16(64)),
    ("draftmark", tree16(1)),
    ("draftmark", chain_of(64)),
    ("draftmark", plain(1)),
    ("draftmark", tree48(16)),
    ("draftmark", chain_of(1)),
    ("draftmark", ngram(64)),
    ("draftmark", plain(16)),
    ("fa3", plain(64)),
)
"""Servers. The texts of the others are compared with those of the first."""
WITH_MTP = (
    ("draftmark", plain(64)),
    ("draftmark", tree16(64)),
    ("draftmark", chain_of(64)),
    ("draftmark", ngram(64)),
    ("fa3", plain(64)),
    ("fa3", tree16(64)),
)
"""Servers of a model with an MTP layer."""
CACHED: dict[str, Any] = dict(
    disable_radix_cache=False, mamba_radix_cache_strategy="extra_buffer", mamba_track_interval=64,
    max_mamba_cache_size=64, chunked_prefill_size=128,
)  # fmt: skip
"""Arguments of a server that keeps checkpoints of the states of a hybrid model."""
ON_RANKS = 2
"""Number of servers that run with several ranks."""
LOG_LINES = 60
PORT = "DRAFTMARK_TEXTS_PORT"
"""Variable with the first port of the ranks' groups, chosen by the parent process: each server takes the next one."""


def prompts() -> list[list[int]]:
    """Return one random prompt of each length."""
    make = random.Random(3)
    return [[make.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def served(folder: Path) -> tuple[tuple[str, Case], ...]:
    """Return the servers of the model in a folder. A model without a draft model has an MTP layer."""
    return SERVED if (folder / "draft").exists() else WITH_MTP


def serve(number: int, folder: Path, rank: int, ranks: int, rehearsed: bool, checked: bool, cached: bool) -> None:
    """Decode all prompts together; write texts, verifications and the number of forwards that the ranks compared."""
    backend, case = served(folder)[number]
    os.environ.update((NGRAM_COMPILER if case.speculate == "ngram" else {}) | (ON_A_CPU if rehearsed else {}))
    import_sglang(rehearsed)
    if rehearsed:
        _never_wait_for_a_gpu()
    from .dummies import pools_of_requested_size

    pools_of_requested_size()
    check = StateCheck()
    if checked:
        check.install()
    arguments = _arguments(backend, case, folder, rehearsed)
    if cached:
        arguments |= CACHED
    if ranks > 1:
        os.environ["DRAFTMARK_GUARD"] = "1"
        arguments |= dict(
            tp_size=ranks, nccl_port=int(os.environ[PORT]) + number, disable_custom_all_reduce=True, rank=rank,
            enforce_disable_flashinfer_allreduce_fusion=True,  # its workspace waits for multicast memory
        )  # fmt: skip
    scheduler = scheduler_of(**arguments)
    for turn in range(1 + cached):
        running = submit(scheduler, prompts(), TOKENS, f"turn-{turn}")
        run_until_done(scheduler, running)
    texts = [list(request.output_ids)[:TOKENS] for request in running]
    verifications = sum(getattr(request, "spec_verify_ct", 0) for request in running)
    served_by = scheduler.tp_worker.model_runner.attn_backend
    # In a hybrid model SGLang's backend wraps draftmark's.
    forwards = getattr(getattr(served_by, "full_attn_backend", served_by), "_comparison", None)
    result = dict(texts=texts, verifications=verifications, forwards_compared=getattr(forwards, "compared", 0))
    result |= dict(check=check.rows(), cached=sum(request.cached_tokens for request in running))
    _file(folder, number, rank).write_text(json.dumps(result))
    os._exit(0)


def _never_wait_for_a_gpu() -> None:
    """Replace torch's wait for a GPU: SGLang's DeepSeek calls it when the MTP layer takes the target's weights."""
    import torch

    torch.cuda.synchronize = lambda *_: None


def _arguments(backend: str, case: Case, folder: Path, rehearsed: bool) -> dict[str, Any]:
    drafts = drafting(case, folder / "draft")
    if served(folder) is WITH_MTP:
        drafts.pop("speculative_draft_model_path", None)
        drafts |= dict(disable_radix_cache=True)
    if json.loads((folder / "target" / "config.json").read_text())["model_type"] == "qwen3_next":
        drafts |= dict(max_mamba_cache_size=8)
    return dict(
        model_path=str(folder / "target"),
        device="cpu" if rehearsed else "cuda",
        dtype="float32" if rehearsed else "bfloat16",
        attention_backend=backend if backend == "draftmark" or not rehearsed else "torch_native",
        page_size=case.page_size,
        mem_fraction_static=0.5 if rehearsed else 0.9,
        max_total_tokens=65536,
        max_running_requests=8,
        cuda_graph_bs_decode=[2, 4, 8],  # requests end in different rounds, so batches of 3, 5, 6 and 7 are padded
        cuda_graph_backend_prefill="disabled",
        disable_cuda_graph=rehearsed,
        **drafts,
    )


def judge(folder: Path, numbers: list[int], ranks: int, rehearsed: bool) -> list[dict[str, Any]]:
    """Return a row per server: its texts compared with the texts of the first server that generated some."""
    import torch
    import transformers

    made = {number: [_read(_file(folder, number, rank)) for rank in range(ranks)] for number in numbers}
    whole = [number for number in numbers if all(made[number])]
    models: list[Any] = []
    if whole:
        models = [
            transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).to(
                "cpu" if rehearsed else "cuda"
            )
            for dtype in (torch.float32, torch.bfloat16)
        ]
    return [
        _about(folder, number) | _row(made[number], made[whole[0]][0]["texts"], models)
        if number in whole
        else _about(folder, number) | dict(result="gave no texts", log=_log_tail(folder, number, ranks))
        for number in numbers
    ]


def _about(folder: Path, number: int) -> dict[str, Any]:
    backend, case = served(folder)[number]
    return dict(backend=backend, case=case.name, page_size=case.page_size)


def _row(ranks: list[Any], plain: list[list[int]], models: list[Any]) -> dict[str, Any]:
    one = ranks[0]
    parted = [_parting(models, *each) for each in zip(prompts(), plain, one["texts"], strict=True)]
    found = [part for part in parted if part]
    row = dict(texts=len(parted), equal=len(parted) - len(found), parted=found)
    off = [_off(models, *each) for each in zip(prompts(), one["texts"], strict=True)]
    row |= dict(off=sum(map(len, off)), off_first=[each[0] if each else None for each in off])
    row |= dict(tokens=sum(map(len, one["texts"])), verifications=one["verifications"])
    if one["cached"]:
        row |= dict(cached=one["cached"])
    if one["check"]:
        row |= dict(check=one["check"])
    if len(ranks) > 1:
        same = all(other["texts"] == one["texts"] for other in ranks)
        row |= dict(ranks=len(ranks), ranks_agree=same, forwards_compared=one["forwards_compared"])
    return row


def _off(models: list[Any], prompt: list[int], text: list[int]) -> list[int]:
    """Return which tokens of a text are not the fp32 model's choice after the tokens before, except near ties."""
    import torch

    ids, first = torch.tensor([prompt + text], device=models[0].device), len(prompt) - 1
    with torch.no_grad():
        exact, rough = (model(ids).logits[0, first:-1].float() for model in models)
    gaps = exact.amax(-1) - exact.gather(1, ids[0, first + 1 :, None])[:, 0]
    return (gaps > 2 * (exact - rough).abs().amax(-1)).nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


def _parting(models: list[Any], prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any] | None:
    """Return the fp32 logit gap and the largest bf16 error at the first different token; None for equal texts."""
    import torch

    at = next((n for n, (a, b) in enumerate(zip(plain, other, strict=False)) if a != b), None)
    if at is None:
        return None
    ids = torch.tensor([prompt + plain[:at]], device=models[0].device)
    with torch.no_grad():
        exact, rough = (model(ids).logits[0, -1].float() for model in models)
    gap = float((exact[plain[at]] - exact[other[at]]).abs())
    error = float((exact - rough).abs().max())
    return dict(at=at, gap=round(gap, 4), error=round(error, 4), near_tie=gap <= 2 * error)


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"texts.{number}.{rank}.json"


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else None


def _log_tail(folder: Path, number: int, ranks: int) -> list[str]:
    logs = [folder / f"log.{number}.{rank}" for rank in range(ranks)]
    return [line for log in logs for line in log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]]


def start(folder: Path, numbers: list[int], ranks: int, more: list[str]) -> list[subprocess.Popen[bytes]]:
    """Start the processes of all ranks of these servers at once, with more options."""
    servers = []
    os.environ.setdefault(PORT, str(random.SystemRandom().randrange(20000, 30000)))
    for number in numbers:
        for rank in range(ranks):
            command = [sys.executable, "-m", "benchmarks.sglang.texts", str(folder), "--serve", str(number)]
            command += ["--rank", str(rank), "--ranks", str(ranks), *more]
            with (folder / f"log.{number}.{rank}").open("wb") as log:
                servers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return servers


def main() -> None:
    """Run all servers at once, and write the comparison of their texts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.texts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--ranks", type=int, default=1, help="ranks of each server, with one GPU each")
    parser.add_argument("--servers", help="indices in SERVERS; by default all, or the first two with several ranks")
    parser.add_argument("--latent", action="store_true", help="serve a small DeepSeek V3 with its MTP layer")
    parser.add_argument("--hybrid", action="store_true", help="serve a small Qwen3-Next with its MTP layer")
    parser.add_argument("--check", action="store_true", help="compare recurrent layers with float64")
    parser.add_argument("--cached", action="store_true", help="resume prompts of a hybrid model at checkpoints")
    parser.add_argument("--rehearse", action="store_true", help="run on a CPU, in fp32")
    parser.add_argument("--serve", type=int, help="internal: run this server")
    parser.add_argument("--rank", type=int, default=0, help="internal: rank of the server process")
    options = parser.parse_args()
    if options.serve is not None:
        given = options.rank, options.ranks, options.rehearse, options.check, options.cached
        serve(options.serve, options.out, *given)
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    dtype = "float32" if options.rehearse else "bfloat16"
    if options.latent or options.hybrid:
        write = write_latent if options.latent else write_hybrid
        write(folder / "target", dtype)
    else:
        write_guessable(folder, dtype)
    numbers = list(range(len(served(folder))))[: ON_RANKS if options.ranks > 1 else None]
    if options.servers:
        numbers = [int(one) for one in options.servers.split(",")]
    more = [f"--{name}" for name in ("rehearse", "check", "cached") if getattr(options, name)]
    servers = start(folder, numbers, options.ranks, more)
    while time.monotonic() - began < options.seconds and any(one.poll() is None for one in servers):
        time.sleep(0.1)
    for one in servers:
        one.kill()
    rows = judge(folder, numbers, options.ranks, options.rehearse)
    for row in rows:
        print({key: value for key, value in row.items() if key not in ("log", "check")}, flush=True)
        for one in row.get("check", []):
            print("   ", *one.values(), flush=True)
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
