"""SGLang's arguments and environment for one server of `cases`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftmark_sglang_judge.in_process import eagle_arguments

from .cases import Case, Server


def drafting(case: Case, head: Path) -> dict[str, Any]:
    """Return SGLang's arguments for a case's drafts."""
    if case.speculate == "none":
        return {}
    if case.speculate == "ngram":
        return dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=case.num_draft_tokens)
    return eagle_arguments(head, case.topk, case.num_steps, case.num_draft_tokens)


def server_arguments(server: Server, folder: Path, rehearsed: bool = False) -> dict[str, Any]:
    """Return all arguments that differ from SGLang's defaults. Decode graphs have only the points' batch sizes."""
    case = server.case
    batches = sorted({requests for requests, _ in server.points})
    arguments: dict[str, Any] = dict(
        model_path=str(folder / "target"),
        load_format="dummy",
        device="cpu" if rehearsed else "cuda",
        dtype="float32" if rehearsed else "bfloat16",
        attention_backend=server.backend,
        page_size=case.page_size,
        mem_fraction_static=0.97,
        max_total_tokens=server.tokens,
        max_running_requests=batches[-1],
        cuda_graph_bs_decode=batches,
        cuda_graph_backend_prefill="disabled",
        disable_radix_cache=True,
        chunked_prefill_size=8192,
    )
    if rehearsed:
        arguments |= dict(disable_cuda_graph=True, mem_fraction_static=0.5)
    return arguments | drafting(case, folder / "draft")


def environment(server: Server, rehearsed: bool = False) -> dict[str, str]:
    """Return the server's environment: simulated acceptance, which SGLang reads at import, and compiler flags."""
    case = server.case
    found = (NGRAM_COMPILER if case.speculate == "ngram" else {}) | (ON_A_CPU if rehearsed else {})
    if case.speculate == "none":
        return found
    return found | {"SGLANG_SIMULATE_ACC_LEN": str(case.accept), "SGLANG_SIMULATE_ACC_METHOD": "match-expected"}


NGRAM_COMPILER = {"CXX": str(Path(__file__).with_name("with_cstddef.sh"))}
"""SGLang compiles its n-gram corpus at first use, and the source of 0.5.17 lacks an include. The compiler must be the
path of a file, because newer releases run it without a shell."""
ON_A_CPU = {"SGLANG_USE_CPU_ENGINE": "1", "TRITON_INTERPRET": "1", "TORCHDYNAMO_DISABLE": "1"}
"""SGLang's allocators and index kernels are Triton kernels, so a rehearsal on a CPU interprets them."""
