"""Cases for which kernels are compiled without a GPU, and the loops of their machine code."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics import common, select
from draftmark_cuda_triton.kv_write import write_kv
from draftmark_cuda_triton.launch import attention, metadata, operands, tma

REQS, PAGES, COLUMNS = 2, 4, 8


@dataclass(frozen=True)
class Case:
    """Describes one attention shape and batch for which the kernels are compiled.

    Attributes:
        q_len: rows of each request; 0 for EXTEND.
        heads: query heads, KV heads.
        dtype: dtype of q, and of K and V unless `fp8`.
        fp8: K and V are float8_e4m3fn.
        tree: the rows have a tree mask; not for EXTEND.
        ragged: requests have different numbers of rows; not for EXTEND, where they always do.
        window: tokens before its own position that a row sees; -1 for no window.
        cap: soft cap of the scores; 0.0 for none.
        sinks: each query head has a sink logit.
        split: EXTEND's row tiles are split along their keys.
        rounds: the layer lets attention round q and weights to e4m3; with `fp8`.
    """

    q_len: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    tree: bool = False
    ragged: bool = False
    window: int = -1
    cap: float = 0.0
    sinks: bool = False
    split: bool = False
    rounds: bool = False

    def shape(self) -> AttentionShape:
        """Return the attention shape of the case."""
        name = str(self.dtype).removeprefix("torch.")
        return AttentionShape(
            *self.heads, self.head_dim, self.page_size, q_dtype=name,
            kv_dtype="float8_e4m3fn" if self.fp8 else name, window_left=self.window, round_to_e4m3=self.rounds,
        )  # fmt: skip


USUAL = [
    Case(),
    Case(16, tree=True),
    Case(0),
    Case(0, split=True),
    Case(1, heads=(64, 8), head_dim=64, window=127, sinks=True),
    Case(page_size=64, fp8=True),
    Case(page_size=1),
    Case(16, page_size=4, tree=True),
]

OTHERS = [
    Case(0, page_size=1, split=True),
    Case(0, heads=(64, 8), head_dim=64, sinks=True, split=True),
    Case(0, heads=(16, 4), head_dim=256, page_size=64, split=True),
    Case(0, heads=(32, 8), head_dim=160, window=100, cap=30.0, split=True),
    Case(0, fp8=True, split=True),
    Case(0, dtype=torch.float32, split=True),
    Case(0, heads=(64, 8), head_dim=64, sinks=True),
    Case(0, heads=(32, 8), head_dim=160, window=100),
    Case(16, heads=(32, 8), head_dim=160, tree=True, ragged=True, sinks=True),
    Case(64, heads=(32, 8), head_dim=160, page_size=64, tree=True, cap=30.0),
    Case(0, heads=(32, 32), head_dim=80, sinks=True),
    Case(64, heads=(32, 32), head_dim=96, page_size=1, tree=True),
    Case(64, heads=(24, 8), head_dim=96, tree=True),
    Case(0, heads=(24, 8), head_dim=192, page_size=1),
    Case(8, heads=(24, 8), head_dim=192, tree=True),
    Case(0, heads=(32, 32), head_dim=80, fp8=True),
    Case(16, heads=(64, 8), head_dim=64, tree=True, ragged=True, sinks=True),
    Case(64, heads=(64, 8), head_dim=64, tree=True, window=127, sinks=True),
    Case(16, tree=True, fp8=True, sinks=True),
    Case(0, fp8=True, window=64),
    Case(0, head_dim=256, cap=30.0),
    Case(0, heads=(16, 4), head_dim=256, fp8=True),
    Case(40, heads=(16, 4), head_dim=192, fp8=True, tree=True),
    Case(1, fp8=True),
    Case(16, fp8=True, tree=True),
    Case(8, fp8=True, tree=True, ragged=True, window=64, cap=30.0),
    Case(3, heads=(16, 8), head_dim=256, fp8=True, tree=True),
    Case(1, heads=(16, 8), head_dim=96, fp8=True, dtype=torch.float16),
    Case(8, heads=(16, 8), head_dim=64, fp8=True),
    Case(8, heads=(14, 7), head_dim=64, fp8=True),
    Case(4, heads=(64, 8), head_dim=64, fp8=True, tree=True, ragged=True, sinks=True),
    Case(1, heads=(32, 32), head_dim=80),
    Case(4, heads=(32, 8), head_dim=120, tree=True, window=100),
    Case(4, heads=(64, 8), head_dim=64, page_size=1, tree=True),
    Case(16, heads=(8, 2), head_dim=120, tree=True),
    Case(1, heads=(64, 8), head_dim=64, ragged=True),
    Case(4, heads=(64, 8), head_dim=64, page_size=64, tree=True, ragged=True, cap=30.0),
    Case(2, heads=(16, 8), head_dim=48, dtype=torch.float16),
    Case(32, fp8=True, tree=True, window=64),
    Case(8, heads=(40, 8), head_dim=96, cap=30.0),
    Case(8, heads=(16, 4), head_dim=256, page_size=64, ragged=True),
    Case(0, dtype=torch.float32),
    Case(5, dtype=torch.float16, page_size=1),
    Case(64, page_size=1, tree=True),
    Case(0, page_size=1),
    Case(0, heads=(16, 4), head_dim=256, page_size=2, window=100, cap=30.0),
    Case(16, heads=(64, 8), head_dim=64, page_size=20, tree=True, ragged=True, window=127, sinks=True),
    Case(3, heads=(16, 4), head_dim=72, page_size=5, tree=True, dtype=torch.float16),
    Case(1, page_size=1, fp8=True),
    Case(64, fp8=True, tree=True, rounds=True),
    Case(0, page_size=64, fp8=True, split=True, rounds=True),
    Case(64, heads=(64, 8), head_dim=64, fp8=True, tree=True, ragged=True, window=100, sinks=True, rounds=True),
    Case(0, head_dim=112, dtype=torch.float16, fp8=True, cap=30.0, rounds=True),
]


def config_of(case: Case, arch: int) -> common.KernelConfig:
    """Return the configuration for 20 requests. Configurations for fewer or more requests occur in other cases."""
    device = DeviceProfile(kind="cuda", arch=arch, num_sms=132)
    return select.select_config(case.shape(), device, case.q_len or 4096, prefill=not case.q_len, num_reqs=20)


def compile_for(case: Case, arch: int, adjacent_heads: bool = True, attention_only: bool = False) -> None:
    """Launch every kernel of an attention layer for a case, with CPU tensors in place of GPU tensors.

    Under `fake_gpu` a launch compiles the kernel and runs nothing.

    Args:
        adjacent_heads: the heads of a token are adjacent in the cache; otherwise the tokens of a head are.
        attention_only: launch only the attention kernel and, if it splits, the combine kernel.
    """
    shape, device = case.shape(), DeviceProfile(kind="cuda", arch=arch, num_sms=132)
    fixed = operands.AttentionParams(
        shape.num_kv_heads, shape.group_size, case.head_dim, case.page_size, 0.1, case.cap, case.window, pdl=arch >= 90
    )
    rows = REQS * max(case.q_len, 1)
    kv = torch.float8_e4m3fn if case.fp8 else case.dtype
    k, v = torch.empty(2, PAGES, case.page_size, shape.num_kv_heads, case.head_dim, dtype=kv)
    if not adjacent_heads:
        k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (k, v))
    q, new = (torch.empty(rows, heads, case.head_dim, dtype=case.dtype) for heads in case.heads)
    out, scale = torch.empty_like(q), torch.ones(1) if case.fp8 else None
    lens, indptr = torch.ones(REQS, dtype=torch.int32), torch.ones(REQS + 1, dtype=torch.int32)
    table, slots = torch.ones(REQS, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    work = torch.ones(4096, dtype=torch.int32)
    partials = operands.PartialResults(work, torch.empty(64), torch.empty(64))
    sinks = torch.ones(case.heads[0]) if case.sinks else None
    config = select.adapt_to_cache(shape, device, config_of(case, arch), True, tma.has_gluon(), adjacent_heads)
    if not attention_only:
        write_kv(new, new, k, v, scale, scale, slots)
    if not case.q_len:
        split = operands.SplitBuffers(4, 32, partials) if case.split else None
        schedule = (None, work, 4, 32) if case.split else ()
        if not attention_only:
            metadata.write_metadata_prefill(fixed, config, rows, lens, indptr, table, slots, work, *schedule)
        given = operands.Operands(q, k, v, scale, scale, sinks, out, None, lens, indptr, table)
        attention.attend_prefill(fixed, config, rows, given, work, split)
        return
    extent = operands.BatchExtent(REQS, case.q_len, case.q_len, rows, case.ragged)
    mask = torch.ones(rows, 1, dtype=torch.int32) if case.tree else None
    depth = torch.ones(rows, dtype=torch.int32) if case.tree else None
    if not attention_only:
        metadata.write_metadata_decode_verify(fixed, config, extent, 4, lens, table, slots, work, indptr)
    given = operands.Operands(q, k, v, scale, scale, sinks, out, None, lens, indptr, table, mask, depth)
    attention.attend_decode_verify(fixed, config, extent, 4, given, partials)


def attention_of(case: Case):
    """Return the only attention kernel compiled for a case on Hopper; `fake_gpu` starts with empty kernel caches."""
    compile_for(case, 90, attention_only=True)
    from draftmark_cuda_triton import kernels_sm90

    functions = (
        kernels_sm90.prefill.attend_prefill,
        kernels_sm90.prefill_gather.attend_prefill_gather,
        kernels_sm90.decode_verify.attend_decode_verify,
        kernels_sm90.decode_verify_fp8.attend_decode_verify_fp8,
        kernels_sm90.decode_verify_gather.attend_decode_verify_gather,
    )
    (binary,) = [one for kernel in functions for caches in kernel.device_caches.values() for one in caches[0].values()]
    return binary


MACHINE_CODE = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) ;")

BACK = re.compile(r"\bBRA 0x([0-9a-f]+)")


def loops_of(cubin: bytes, folder, name="HGMMA") -> list[list[str]]:
    """Return the innermost loops of machine code that contain the instruction `name`, each as a list of instructions.

    Args:
        folder: where the disassembler's input file is written.
    """
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton has no disassembler")
    text = subprocess.run([tool, "-sass", file], check=True, capture_output=True, text=True).stdout
    code = [(int(at, 16), what) for at, what in MACHINE_CODE.findall(text)]
    place = {at: n for n, (at, _) in enumerate(code)}
    ends = [(place[int(to[1], 16)], n) for n, (_, what) in enumerate(code) if (to := BACK.search(what))]
    found = [(begin, end) for begin, end in ends if begin < end]
    inner = [one for one in found if not any(one != (b, e) and one[0] <= b and e <= one[1] for b, e in found)]
    loops = [[what for _, what in code[begin : end + 1]] for begin, end in inner]
    return [loop for loop in loops if num_instructions(name, loop)]


def num_instructions(text, code):
    """Return the number of instructions that contain `text`."""
    return sum(text in what for what in code)
