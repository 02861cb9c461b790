"""Texts of chains and trees beside plain decoding's, on a GPU: equal, or parted where two tokens are nearly tied.

python -m benchmarks.sglang.texts OUT.json [--seconds N] [--rehearse]
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

from draftmark_sglang.in_process import eagle_arguments, run_until_done, scheduler_of, submit

from .cases import chain as chain_of
from .cases import plain, tree16, tree48
from .guessable import VOCABULARY, write_guessable
from .imports import import_sglang

TOKENS = 96
LENGTHS = (7, 20, 64, 65, 130, 200, 320, 511)
SERVED = (
    ("draftmark", plain(64)),
    ("fa3", plain(64)),
    ("draftmark", chain_of(64)),
    ("draftmark", tree16(1)),
    ("draftmark", tree16(64)),
    ("draftmark", tree48(16)),
    ("triton", tree16(1)),
)
"""The first is what the others are compared with."""


def prompts() -> list[list[int]]:
    """One of each length."""
    make = random.Random(3)
    return [[make.randrange(2, VOCABULARY) for _ in range(length)] for length in LENGTHS]


def serve(number: int, folder: Path, rehearsed: bool) -> None:
    """Decode every prompt, together, and write texts and the number of verifications."""
    backend, case = SERVED[number]
    import_sglang(rehearsed)
    backend = backend if backend == "draftmark" or not rehearsed else "torch_native"
    arguments: dict[str, Any] = dict(
        model_path=str(folder / "target"),
        device="cpu" if rehearsed else "cuda",
        dtype="float32" if rehearsed else "bfloat16",
        attention_backend=backend,
        page_size=case.page_size,
        mem_fraction_static=0.5 if rehearsed else 0.9,
        max_total_tokens=65536,
        max_running_requests=8,
        cuda_graph_bs_decode=[2, 4, 8],  # requests end at different rounds: 3, 5, 6 and 7 are padded
        cuda_graph_backend_prefill="disabled",
        disable_cuda_graph=rehearsed,
    )
    if case.speculate != "none":
        arguments |= eagle_arguments(folder / "draft", case.topk, case.num_steps, case.num_draft_tokens)
    scheduler = scheduler_of(**arguments)
    running = submit(scheduler, prompts(), TOKENS)
    run_until_done(scheduler, running)
    texts = [list(request.output_ids)[:TOKENS] for request in running]
    verifications = sum(getattr(request, "spec_verify_ct", 0) for request in running)
    (folder / f"texts.{number}.json").write_text(json.dumps(dict(texts=texts, verifications=verifications)))
    os._exit(0)


def judge(folder: Path, rehearsed: bool) -> list[dict[str, Any]]:
    """Each server's texts beside the first one's."""
    import torch
    import transformers

    files = [folder / f"texts.{number}.json" for number in range(len(SERVED))]
    made = [json.loads(file.read_text()) if file.exists() else None for file in files]
    assert made[0] is not None, "plain decoding gave no texts"
    device = "cpu" if rehearsed else "cuda"
    models = [
        transformers.AutoModelForCausalLM.from_pretrained(folder / "target", dtype=dtype).to(device)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    rows = []
    for (backend, case), one in zip(SERVED, made, strict=True):
        row: dict[str, Any] = dict(backend=backend, case=case.name, page_size=case.page_size)
        if one is None:
            rows.append(row | dict(result="gave no texts"))
            continue
        parted = [_parting(models, *each) for each in zip(prompts(), made[0]["texts"], one["texts"], strict=True)]
        found = [part for part in parted if part]
        row |= dict(texts=len(parted), equal=len(parted) - len(found), parted=found)
        row |= dict(tokens=sum(map(len, one["texts"])), verifications=one["verifications"])
        rows.append(row)
    return rows


def _parting(models: list[Any], prompt: list[int], plain: list[int], other: list[int]) -> dict[str, Any] | None:
    """Where two texts part: the gap between the two tokens' logits in fp32, and how far bf16's logits are off there."""
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


def main() -> None:
    """Serve all side by side, and write how they compare."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.texts")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, in fp32")
    parser.add_argument("--serve", type=int, help="(used by itself)")
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve, options.out, options.rehearse)
    folder, began = Path(tempfile.mkdtemp()), time.monotonic()
    write_guessable(folder, "float32" if options.rehearse else "bfloat16")
    servers = []
    for number in range(len(SERVED)):
        command = [sys.executable, "-m", "benchmarks.sglang.texts", str(folder), "--serve", str(number)]
        with (folder / f"log.{number}").open("wb") as log:
            command += ["--rehearse"] * options.rehearse
            servers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    while time.monotonic() - began < options.seconds and any(one.poll() is None for one in servers):
        time.sleep(0.1)
    for one in servers:
        one.kill()
    rows = judge(folder, options.rehearse)
    for number, row in enumerate(rows):
        if "result" in row:
            row["log"] = (folder / f"log.{number}").read_text(errors="replace").strip().splitlines()[-14:]
        print({key: value for key, value in row.items() if key != "log"}, flush=True)
    options.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
