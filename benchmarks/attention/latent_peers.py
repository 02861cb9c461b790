"""Latent attention (MLA) of other libraries, run on the caches of `latent_cases.Timed`. Each is optional.

* FlashMLA and FlashAttention 3 with `qv` are vLLM's builds, named by DRAFTMARK_FLASHMLA_LIBRARIES (two files, separated
  by a colon) and DRAFTMARK_FA3_LIBRARY.
* FlashInfer is imported.

None has a tree mask: a tree runs as a chain of its rows. Schedules are made ahead, as engines do once a step.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from .fa3 import FA3_LIBRARY
from .latent_cases import Calls, Timed
from .stubs import Absent

FLASHMLA_LIBRARIES = "DRAFTMARK_FLASHMLA_LIBRARIES"
"""Environment variable: paths of vLLM's `_flashmla_C.abi3.so` and `_flashmla_extension_C.abi3.so`."""
VLLM_SPLITS = 32
"""Splits that vLLM asks of FlashAttention 3 in a captured step."""


def flashmla(timed: Timed) -> Calls:
    """Return calls of FlashMLA: pages of 64, rows of 512 + 64 elements."""
    q, lens, table, causal = _flashmla_arguments(timed, "bfloat16")
    forward = torch.ops._flashmla_C.dense_decode_fwd

    def run(cache: torch.Tensor, schedule: tuple) -> tuple:
        return forward(q, cache, 512, lens, table, timed.scale, causal, *schedule, None)

    schedule = run(_rows(timed, 0), (None, None))[2:]

    def call(number: int) -> Callable[[], torch.Tensor]:
        cache = _rows(timed, number)
        return lambda: run(cache, schedule)[0].view(-1, timed.case.heads, 512)

    return [call(number) for number in range(timed.calls)]


def flashmla_fp8(timed: Timed) -> Calls:
    """Return calls of FlashMLA over e4m3 rows, in vLLM's extension, which rounds q and p to e4m3."""
    case = timed.case
    q, lens, table, causal = _flashmla_arguments(timed, "float8_e4m3fn")
    q = q.to(torch.float8_e4m3fn)
    one, ops = torch.ones(1, device=q.device), torch.ops._flashmla_extension_C
    schedule = ops.get_mla_decoding_metadata_dense_fp8(lens, case.rows * case.heads, 1)

    def call(number: int) -> Callable[[], torch.Tensor]:
        cache = _rows(timed, number)

        def run() -> torch.Tensor:
            out: torch.Tensor = ops.fwd_kvcache_mla_fp8(
                q, cache, 512, lens, table, timed.scale, causal, *schedule, one, timed.row_scale
            )[0]
            return out.view(-1, case.heads, 512)

        return run

    return [call(number) for number in range(timed.calls)]


def _flashmla_arguments(timed: Timed, kv_dtype: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]:
    """Load FlashMLA and return what its kernels for rows of `kv_dtype` take.

    Returns:
        q ``[requests, rows, heads, elements]`` bfloat16, keys of each request, page table, and whether rows are causal.

    Raises:
        Absent: the libraries are not named, or FlashMLA does not serve the case.
    """
    case = timed.case
    for path in _files(FLASHMLA_LIBRARIES):
        torch.ops.load_library(path)
    if (case.page, case.value_dim, case.rest_dim, case.kv_dtype) != (64, 512, 64, kv_dtype):
        raise Absent(f"it serves pages of 64 and rows of 512 + 64 {kv_dtype} only")
    q = timed.q.view(case.requests, case.rows, case.heads, case.head_dim)
    return q, _lens(timed), timed.batch.page_table, case.rows > 1


def fa3(timed: Timed, splits: int = 0) -> Calls:
    """Return calls of FlashAttention 3 with `qv`, with its own number of splits or with a given one."""
    case = timed.case
    if case.rest_dim != 64 or case.kv_dtype != "bfloat16":
        raise Absent("it serves a rest of 64 bfloat16 elements only")
    [path] = _files(FA3_LIBRARY)
    torch.ops.load_library(path)
    rows, lens, causal, width = case.rows, _lens(timed), case.rows > 1, case.value_dim
    q, qv = timed.q[..., width:], timed.q[..., :width]
    indptr, table = timed.batch.q_indptr, timed.batch.page_table
    schedule = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        case.requests, rows, case.keys, case.heads, 1, case.rest_dim, width, timed.q.dtype, lens, indptr, None, None,
        None, None, case.page, 0, causal, -1, -1, False, splits, None, 0,
    )  # fmt: skip

    def call(number: int) -> Callable[[], torch.Tensor]:
        cache = _rows(timed, number)
        k, v, out = cache[..., width:], cache[..., :width], timed.new_out()

        def run() -> torch.Tensor:
            torch.ops._vllm_fa3_C.fwd(
                q, k, v, None, None, qv, out, indptr, None, None, None, lens, rows, case.keys, table, None, None, None,
                None, None, None, None, None, timed.scale, causal, -1, -1, 0.0, True, schedule, splits, None, 0, None,
                1, 0, None,
            )  # fmt: skip
            return out

        return run

    return [call(number) for number in range(timed.calls)]


def fa3_as_in_vllm(timed: Timed) -> Calls:
    """Return calls of FlashAttention 3 with vLLM's number of splits."""
    return fa3(timed, VLLM_SPLITS)


def flashinfer(timed: Timed) -> Calls:
    """Return calls of FlashInfer's `BatchMLAPagedAttentionWrapper` with its Hopper backend."""
    case = timed.case
    if case.value_dim != 512 or case.rest_dim not in (0, 64) or case.kv_dtype != "bfloat16":
        raise Absent("it serves values of 512 and a rest of 64 or 0 bfloat16 elements only")
    try:
        from flashinfer.mla import BatchMLAPagedAttentionWrapper
    except ImportError as error:
        raise Absent(str(error)) from error
    wrapper = BatchMLAPagedAttentionWrapper(
        torch.empty(256 << 20, dtype=torch.uint8, device=timed.q.device), backend="fa3"
    )
    pages = -(-case.keys // case.page)
    table = timed.batch.page_table[:, :pages].contiguous().view(-1)
    starts = torch.arange(case.requests + 1, dtype=torch.int32, device=timed.q.device) * pages
    wrapper.plan(
        timed.batch.q_indptr, starts, table, _lens(timed), case.heads, 512, case.rest_dim, case.page, case.rows > 1,
        timed.scale, timed.q.dtype, timed.q.dtype,
    )  # fmt: skip
    q, rest = timed.q[..., :512].contiguous(), timed.q[..., 512:].contiguous()

    def call(number: int) -> Callable[[], torch.Tensor]:
        cache, out = _rows(timed, number)[:, :, 0], timed.new_out()
        values, rests = cache[..., :512], cache[..., 512:]
        return lambda: wrapper.run(q, rest, values, rests, out=out)

    return [call(number) for number in range(timed.calls)]


PEERS: dict[str, Callable[[Timed], Calls]] = {
    "flashmla": flashmla,
    "flashmla_fp8": flashmla_fp8,
    "fa3_qv": fa3,
    "fa3_qv_32": fa3_as_in_vllm,
    "flashinfer_fa3": flashinfer,
}


def _files(name: str) -> list[str]:
    """Return the files that an environment variable names."""
    paths = os.environ.get(name, "").split(":")
    if not all(map(os.path.exists, paths)):
        raise Absent(f"{name} names no file")
    return paths


def _lens(timed: Timed) -> torch.Tensor:
    """Return the keys of each request, int32."""
    return timed.batch.prefix_lens + timed.case.rows


def _rows(timed: Timed, number: int) -> torch.Tensor:
    """Return the rows of a cache, ``[pages, P, 1, elements]``."""
    return timed.pages[number].unsqueeze(2)
