"""FlashInfer's own FA2 planner of one release, compiled with g++ for a CPU that reports an H200's properties.

The planner reads only host data. Its functions are cut out of the release's headers, because the headers include CUDA.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from draftmark_testing.flashinfer_releases import FlashInferRelease

INCLUDE = "data/include/flashinfer"
SCHEDULER, UTILS = f"{INCLUDE}/attention/scheduler.cuh", f"{INCLUDE}/utils.cuh"
BEFORE = """
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>
#include "allocator.h"
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess };
enum Attribute { cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin };
enum Direction { cudaMemcpyHostToDevice };
static int sms;
static cudaError_t cudaGetDevice(int* id) { *id = 0; return cudaSuccess; }
static cudaError_t cudaDeviceGetAttribute(int* value, Attribute of, int) {
  *value = of == cudaDevAttrMultiProcessorCount ? sms : 232448;
  return cudaSuccess;
}
static cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, Direction, cudaStream_t) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}
#define FLASHINFER_CUDA_CALL(call) (call)
namespace flashinfer {
template <typename A, typename B> constexpr A ceil_div(const A x, const B y) { return (x + y - 1) / y; }
static std::pair<int, int> GetCudaComputeCapability() { return {9, 0}; }
"""
AFTER = """
}  // namespace flashinfer
extern "C" void plan(int* qo_indptr, int* kv_indptr, int count, int heads, int kv_heads, int dim, int page_size,
                     bool graph, int window, int fixed, int q_len, int num_sms, size_t* out) {
  sms = num_sms;
  flashinfer::PrefillPlanInfo info;
  flashinfer::PrefillPlanImpl<false>(out[0], out[1], nullptr, 0, nullptr, nullptr, 0, info, qo_indptr, kv_indptr,
                                     qo_indptr[count], count, heads, kv_heads, dim, dim, page_size, graph, 2, window,
                                     fixed, false, 0, q_len, FURTHER nullptr);
  out[2] = info.padded_batch_size;
}
"""


class Planner:
    """Planner of one release. Call it with the arguments of `library_plan`.

    Args:
        release: sources of the release.
        folder: empty folder for the generated source and the library.
    """

    def __init__(self, release: FlashInferRelease, folder: Path) -> None:
        scheduler = release.read(SCHEDULER)
        implementation = _cut(scheduler, r"inline cudaError_t PrefillPlanImpl\(")
        parts = [
            BEFORE,
            _cut(release.read(UTILS), r"inline uint32_t FA2DetermineCtaTileQ\("),
            _cut(scheduler, r"inline auto PrefillBinarySearchKVChunkSize\("),
            _cut(scheduler, r"inline auto PrefillSplitQOKVIndptr\("),
            _cut(scheduler, r"struct PrefillPlanInfo \{"),
            implementation,
            AFTER.replace("FURTHER", "false," if "fixed_uniform_q_len" in implementation else ""),
        ]
        for name in ("allocator.h", "exception.h"):
            (folder / name).write_text(release.read(f"{INCLUDE}/{name}"))
        (folder / "planner.cpp").write_text("\n".join(parts))
        command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-o", "planner.so", "planner.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        self._plan = ctypes.CDLL(str(folder / "planner.so")).plan

    def __call__(
        self, q_lens: Sequence[int], pages: Sequence[int], *, heads: int, kv_heads: int, dim: int, page_size: int,
        sms: int, graph: bool, q_len: int = 0, window: int = -1, fixed: int = -1,
    ) -> tuple[int, int, int]:  # fmt: skip
        """Return (bytes of float workspace, bytes of int workspace, CTAs of the grid) of one plan."""
        count, out = len(q_lens), (ctypes.c_size_t * 3)()
        rows, keys = ((ctypes.c_int * (count + 1))(0, *accumulate(one)) for one in (q_lens, pages))
        self._plan(
            rows, keys, count, heads, kv_heads, dim, page_size, ctypes.c_bool(graph), window, fixed, q_len, sms, out
        )
        return out[0], out[1], out[2]


def _cut(text: str, signature: str) -> str:
    """Return a function or struct, with its template line, from a header."""
    found = re.search(rf"^(template <[^\n]*>\n)?{signature}.*?^\}};?\n", text, re.MULTILINE | re.DOTALL)
    assert found, f"the release has no {signature}"
    return found.group(0)
