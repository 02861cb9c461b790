"""Compilation of every kernel to machine code with the installed Triton; no GPU is needed.

Gluon is experimental: from Triton 3.6 to 3.9 three of the names that `kernels_sm90` uses changed.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_cuda_triton import kernel_list
from draftmark_cuda_triton.heuristics import common, select, sm90
from draftmark_cuda_triton.kernel_variants import kernels
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

    def shape(self) -> AttentionShape:
        """Return the attention shape of the case."""
        name = str(self.dtype).removeprefix("torch.")
        return AttentionShape(
            *self.heads, self.head_dim, self.page_size, q_dtype=name,
            kv_dtype="float8_e4m3fn" if self.fp8 else name, window_left=self.window,
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


@pytest.mark.parametrize(
    "case", [*USUAL[:2], *(pytest.param(one, marks=pytest.mark.long) for one in USUAL[2:])], ids=str
)
def test_kernels_compile_for_hopper(fake_gpu, case):
    """The Hopper kernels compile, together with the other kernels that a layer launches."""
    compile_for(case, 90)
    names = [source.fn.__name__ for source, _ in fake_gpu.launched]
    assert names[0] == "write_kv_rows" and any(name.startswith("attend_") for name in names)
    assert "kernels_sm90" in next(
        source.fn.__module__ for source, _ in fake_gpu.launched if "attend" in source.fn.__name__
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(1, heads=(64, 8), head_dim=64), "attend_decode_verify"),
        pytest.param(Case(4, heads=(16, 4), head_dim=96), "attend_decode_verify", marks=pytest.mark.slow),
        (Case(1, heads=(16, 8), head_dim=80), "attend_decode_verify_gather"),
        pytest.param(Case(1, heads=(64, 8), head_dim=64, fp8=True), "attend_decode_verify", marks=pytest.mark.slow),
        (Case(1, heads=(16, 8), head_dim=80, fp8=True), "attend_decode_verify_fp8"),
    ],
    ids=str,
)
def test_kernels_compile_for_non_adjacent_heads(fake_gpu, case, name):
    """Shapes that merge two adjacent KV heads also compile for caches with non-adjacent heads."""
    compile_for(case, 90, adjacent_heads=False)
    assert name in [source.fn.__name__ for source, _ in fake_gpu.launched]


@pytest.mark.long
@pytest.mark.parametrize(("reqs", "rows"), [(2, 70), (40, 40), (3, 900), (100, 300)])
def test_schedules_of_any_size_compile(fake_gpu, reqs, rows):
    """The metadata kernels compile for any number of requests and rows."""
    config = config_of(Case(0), 90)
    lens, indptr = torch.ones(reqs, dtype=torch.int32), torch.ones(reqs + 1, dtype=torch.int32)
    table, slots = torch.ones(reqs, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    tiles, work = torch.ones(4096, dtype=torch.int32), torch.ones(4096, dtype=torch.int32)
    shape = operands.AttentionParams(8, 4, 128, 16, 0.1)
    for schedule in ((), (None, work, 16, 132)):
        metadata.write_metadata_prefill(shape, config, rows, lens, indptr, table, slots, tiles, *schedule)
    for splits, whole in ((33, False), (reqs, True)):
        extent = operands.BatchExtent(reqs, 3, 3, rows, ragged=True, whole_requests=whole)
        metadata.write_metadata_decode_verify(shape, config, extent, splits, lens, table, slots, work, indptr)
    assert [source.fn.__name__ for source, _ in fake_gpu.launched] == [
        *["write_metadata_prefill"] * 2,
        *["write_metadata_decode_verify"] * 2,
    ]


@pytest.mark.long
@pytest.mark.parametrize(
    ("fake_driver", "dtype"),
    [
        *((80, dtype) for dtype in (torch.bfloat16, torch.float32)),
        *(pytest.param(arch, torch.bfloat16, marks=pytest.mark.slow) for arch in (90, 100)),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
    indirect=["fake_driver"],
)
def test_soft_cap_is_one_instruction_for_16_bit_rows(fake_gpu, fake_driver, dtype):
    """Generic kernels cap the scores of 16-bit rows with tanh.approx.f32, and those of float32 rows exactly."""
    # A head_dim of 32 is too small for the Hopper kernels, so sm_90 also uses the generic kernels that this test
    # checks.
    case = Case(16, heads=(8, 2), head_dim=32, dtype=dtype, tree=True, cap=50.0)
    compile_for(case, fake_driver._arch)
    caches = kernels.decode_verify.attend_decode_verify.device_caches.values()
    (binary,) = [one for cache, *_ in caches for one in cache.values()]
    assert ("tanh.approx.f32" in binary.asm["ptx"]) == (dtype is torch.bfloat16)


WIDE_PAGES = Case(16, page_size=64, fp8=True, tree=True)
GATHERED_72 = Case(8, page_size=12, head_dim=72, tree=True)
ACCESS = re.compile(r"griddepcontrol\.(?:wait|launch_dependents)|(?:ld|st|red|atom)\.global|cp\.async")

GRID_CASES = {
    Case(): "attend_decode_verify",
    Case(16, tree=True): "attend_decode_verify",
    Case(3, ragged=True): "attend_decode_verify",
    Case(page_size=1): "attend_decode_verify_gather",
    Case(1, page_size=4, fp8=True): "attend_decode_verify",
    Case(page_size=64, fp8=True): "attend_decode_verify_fp8",
    Case(0, split=True): "attend_prefill",
    Case(0, page_size=1, split=True): "attend_prefill_gather",
}


@pytest.mark.long
@pytest.mark.parametrize("case", GRID_CASES, ids=str)
def test_grid_waits_for_the_previous_grid(fake_gpu, case):
    """A PDL grid waits for the previous grid and permits the next one to start before it accesses global memory."""
    from draftmark_cuda_triton import kernels_sm90

    compile_for(case, 90)
    found = {}
    for kernel in (
        kernels.decode_verify.attend_decode_verify,
        kernels.prefill.attend_prefill,
        kernels.combine.combine_splits,
        kernels.kv_write.write_kv_rows,
        kernels_sm90.decode_verify.attend_decode_verify,
        kernels_sm90.decode_verify_fp8.attend_decode_verify_fp8,
        kernels_sm90.decode_verify_gather.attend_decode_verify_gather,
        kernels_sm90.prefill.attend_prefill,
        kernels_sm90.prefill_gather.attend_prefill_gather,
    ):
        for cache, *_ in kernel.device_caches.values():
            found |= {(one.name, one.hash): one for one in cache.values()}
    assert {name for name, _ in found} >= {GRID_CASES[case], "combine_splits", "write_kv_rows"}
    for (name, _), one in found.items():
        order = ACCESS.findall(one.asm["ptx"])
        wait = order.index("griddepcontrol.wait")
        assert one.metadata.launch_pdl
        assert order[wait + 1] == "griddepcontrol.launch_dependents", name
        assert order.count("griddepcontrol.launch_dependents") == 1, name
        # The combine kernel reads the tile schedule before it waits, but stores only afterwards. Other kernels wait
        # first.
        assert wait == 0 if name != "combine_splits" else "st.global" not in order[:wait], name


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(Case(1, head_dim=104), Case(0, head_dim=104), GATHERED_72, Case(page_size=64, fp8=True)),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (Case(16, head_dim=120, tree=True), Case(4, fp8=True))),
    ],
    ids=str,
)
def test_rows_move_16_bytes_at_a_time(fake_gpu, case):
    """Rows of every head_dim that is a multiple of 8 are loaded and stored 16 bytes at a time."""
    # Triton cannot derive the alignment of row strides that are not multiples of 16 elements, so the kernel declares
    # it.
    ptx = attention_of(case).asm["ptx"]
    assert not re.search(r"(?:ld|st)\.global[.\w]*\.[bu]16\b", ptx)
    assert "st.global.v4.b32" in ptx and ("ld.global.v4.b32" in ptx or case.fp8)


STEP = re.compile(r"mbarrier\.try_wait|fence\.proxy\.async|wgmma\.mma_async")
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global .*")
COPY_OR_ARRIVE = re.compile(r"cp\.async\.(?:c[ag]\.shared\.global|mbarrier\.arrive)")


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [Case(page_size=1), GATHERED_72, pytest.param(Case(head_dim=160), marks=pytest.mark.slow)], ids=str
)
def test_gathered_keys_are_copied_by_16_bytes_and_fenced(fake_gpu, case):
    """Gathered keys are copied 16 bytes at a time, and a proxy fence precedes each product that reads them."""
    ptx, config = attention_of(case).asm["ptx"], config_of(case, 90)
    copies = COPY.findall(ptx)
    assert (
        len(copies)
        == 2 * config.block_n * 2 * sum(sm90.split_head_dim(config.kv_heads_per_tile * case.head_dim)) // 16 // 128
    )
    assert all(".cg." in copy and "0x10" in copy for copy in copies)
    assert ptx.count("cp.async.mbarrier.arrive.noinc") == ptx.count("cp.async.mbarrier.arrive")
    # Arrivals follow the copies of K and of V. Consumer threads use the same instruction, without copies before it.
    order = "".join("c" if "shared" in found else "a" for found in COPY_OR_ARRIVE.findall(ptx))
    assert len(re.findall("c+a", order)) == 2 and not re.search("c$", order)
    steps = STEP.findall(ptx)
    waits = [
        i for i, step in enumerate(steps) if step == "mbarrier.try_wait" and "wgmma" in "".join(steps[i + 1 : i + 3])
    ]
    assert waits and all(steps[i + 1] == "fence.proxy.async" for i in waits)
    products = [i for i, step in enumerate(steps) if step == "wgmma.mma_async"]
    assert all(steps[i - 1] != "mbarrier.try_wait" for i in products)


MACHINE_CODE = re.compile(r"/\*([0-9a-f]{4,})\*/ +(.*?) ;")
BACK = re.compile(r"\bBRA 0x([0-9a-f]+)")
WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([012])")


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


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(Case(0), Case(64, tree=True), Case(16, tree=True), Case(0, head_dim=160)),
        *(Case(0, heads=(32, 16), cap=50.0), Case(16, heads=(40, 8), tree=True, window=100)),
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (*(Case(0, page_size=64), Case(64, tree=True, window=1000), Case(16, heads=(40, 8), tree=True)),)
        ),
    ],
    ids=str,
)
def test_softmax_overlaps_wgmma(fake_gpu, case, tmp_path):
    """The mainloop computes the softmax of a tile while the output product of the previous tile runs."""
    # A loop issues q·k and p·v together, waits for q·k, computes the softmax probabilities, and waits for p·v of every
    # column part (`softmax.order_before_wait`, `softmax.pack_pairs`). Each consumer warp group has one such loop, or
    # one for masked tiles and one for unmasked tiles (`config.has_unmasked_loop`).
    widths = [width for width in sm90.split_head_dim(case.head_dim) if width]
    config = config_of(case, 90)
    products = sum(widths) // 16 + len(widths) * config.block_n // 16
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    has_unmasked_loop = (config.num_consumer_wgs, config.block_n) == (2, 64) and case.window < 0
    assert len(loops) == config.num_consumer_wgs * (1 + has_unmasked_loop)
    for loop in loops:
        waits = [n for n, what in enumerate(loop) if "DEPBAR" in what]
        assert [WAIT.search(loop[n])[1] for n in waits] == [str(len(widths)), "0"]
        issue, softmax, rest = loop[: waits[0]], loop[waits[0] : waits[1]], loop[waits[1] :]
        assert [num_instructions("HGMMA", part) for part in (issue, softmax, rest)] == [products, 0, 0]
        assert num_instructions("MUFU.EX2", softmax) == num_instructions("MUFU.EX2", loop) >= config.block_n // 2
        assert num_instructions("PRMT", issue) < 8, "pairs of weights are swapped between the products"


MAXIMUM = re.compile(r"FMNMX (R\d+), (R\d+), (R\d+)")


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [*(Case(0), Case(64, tree=True)), pytest.param(Case(8, heads=(64, 8), head_dim=64), marks=pytest.mark.slow)],
    ids=str,
)
def test_row_max_is_a_balanced_reduction(fake_gpu, case, tmp_path):
    """The maximum of a row's scores is reduced in at most 12 dependent steps."""
    for loop in loops_of(attention_of(case).asm["cubin"], tmp_path):
        steps: dict[str, int] = {}
        deepest = 0
        for what in loop:
            if found := MAXIMUM.search(what):
                steps[found[1]] = 1 + max(steps.get(one, 0) for one in found.groups()[1:])
                deepest = max(deepest, steps[found[1]])
            elif named := re.match(r"(?:@!?U?P\d+ )?[A-Z0-9.]+ (R\d+),", what):
                steps.pop(named[1], None)
        assert num_instructions("FMNMX", loop) >= 64 and 5 < deepest <= 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "max_barriers"),
    [(Case(64, tree=True), 1), (Case(0), 1), (Case(16, tree=True), 1), (Case(page_size=64, fp8=True), 5)],
    ids=str,
)
def test_each_consumer_thread_releases_a_stage(fake_gpu, case, max_barriers, tmp_path):
    """Every consumer thread releases the stages of K and V; no barrier of its warp group precedes the release."""
    # The e4m3 kernel has barriers of 128 threads (0x80) for other reasons: two a tile for the softmax probabilities,
    # one or two where a row maximum is raised, and one for masks.
    for loop in loops_of(attention_of(case).asm["cubin"], tmp_path):
        assert num_instructions("ARRIVES.LDGSTSBAR", loop) == 2
        assert num_instructions("0x80", [what for what in loop if "BAR.SYNC" in what]) <= max_barriers


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [Case(16, fp8=True, tree=True), Case(page_size=64, fp8=True), pytest.param(WIDE_PAGES, marks=pytest.mark.slow)],
    ids=str,
)
def test_register_upcast_spills_almost_nothing(fake_gpu, case, tmp_path):
    """The loops for masked and unmasked tiles spill no register, except one value with a tree mask and Triton 3.7.

    With pages of 64, boxes hold 32 keys (`tma.MAX_FP8_BOX_KEYS`); larger boxes would need more registers.
    """
    most = int(triton.__version__.startswith("3.7."))
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    assert len(loops) == 2
    assert all(num_instructions(name, loop) <= most for loop in loops for name in ("LDL", "STL"))


@pytest.mark.long
def test_three_warp_groups_spill_nothing_at_96_columns(fake_gpu, tmp_path):
    """The loops of three consumer warp groups keep every value of a row tile of 96 columns in registers."""
    case = Case(64, heads=(24, 8), head_dim=96, tree=True)
    assert config_of(case, 90).num_consumer_wgs == 3
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    assert len(loops) == 3
    assert not any(num_instructions(name, loop) for loop in loops for name in ("LDL", "STL"))


def num_instructions(text, code):
    """Return the number of instructions that contain `text`."""
    return sum(text in what for what in code)


BARRIER = re.compile(r"(?:barrier|bar)\.\S+\s+(.*);")
"""PTX barrier. The group holds the barrier's number, and the number of threads unless all threads take part."""
PARTITION_ID_READ = re.compile(r"ld\.shared\.[bu]8\s.*\+(\d+)\]")
SHARED_WRITE = re.compile(r"st\.shared\S*\s+\[global_smem\+(\d+)\]")
MAX_WARPS = 32


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(Case(), Case(64, tree=True), Case(0), Case(0, fp8=True), Case(16, fp8=True, tree=True)),
        *(Case(16, page_size=4, tree=True), Case(0, page_size=1)),
    ],
    ids=str,
)
def test_partition_ids_are_published_between_cta_barriers(fake_gpu, case):
    """All threads of a CTA pass barrier 1 between a write of partition ids and the read of them."""
    # racecheck reports a race between the writes and the read of partition ids, because it does not see barrier 1
    # (NOTES.md, "Checks on the device"). Ids are read in one place. They are written in two: to start the partitions,
    # and to end the CTA.
    code = [line.strip() for line in attention_of(case).asm["ptx"].splitlines()]
    barriers = [(at, found[1]) for at, line in enumerate(code) if (found := BARRIER.match(line))]
    ((read, first),) = [(at, int(found[1])) for at, line in enumerate(code) if (found := PARTITION_ID_READ.match(line))]
    written = [
        at for at, line in enumerate(code)
        if (found := SHARED_WRITE.match(line)) and first <= int(found[1]) < first + MAX_WARPS
    ]  # fmt: skip
    after_writes = {min(barrier for barrier in barriers if barrier[0] > at) for at in written}
    assert len(after_writes) == 2 and {operands for _, operands in after_writes} == {"1"}
    assert max(barrier for barrier in barriers if barrier[0] < read)[1] == "1"
    assert max(barrier for barrier in barriers if barrier[0] < max(written))[1] == "1"


@pytest.mark.long
@pytest.mark.parametrize("case", [Case(0), Case(0, page_size=1)], ids=str)
def test_work_tile_is_read_before_it_is_overwritten(fake_gpu, case):
    """Each receiving partition signals the empty barrier only after a branch on every word of the record."""
    ptx = attention_of(case).asm["ptx"]
    record = re.compile(r"ld\.shared\.v4\.b32.*?mbarrier\.arrive", re.DOTALL)
    receives = [one[0] for one in record.finditer(ptx) if "bra" in one[0] and one[0].count("\n") < 90]
    # `tile_scheduler.receive` is called twice, before the loop and in it, by each consumer warp group and V's TMA
    # producer.
    assert len(receives) == 2 * (3 if case.page_size > 1 else 2)
    for one in receives:
        read = {name for row in re.findall(r"ld\.shared\.v4\.b32\s+\{(.*?)\}", one) for name in row.split(", ")}
        sums = {to: {a, b} for to, a, b in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+);", one)}
        tests = dict(re.findall(r"setp\.\w+\.s32\s+(%p\d+), (%r\d+),", one))
        tested = {tests[branch] for branch in re.findall(r"@!?(%p\d+) bra", one)}
        for _ in range(8):
            tested = {part for name in tested for part in sums.get(name, {name})}
        assert tested == read and len(read) == 8


RECORD_STEP = re.compile(r"(?:st|ld)\.shared|(?:barrier|bar)\.\S+|mbarrier\.(?:arrive\.shared::cta\.b64|try_wait)")


@pytest.mark.long
@pytest.mark.parametrize("case", [Case(0), Case(0, page_size=1), Case(0, split=True)], ids=str)
def test_work_tile_is_published_after_its_fields_are_written(fake_gpu, case):
    """The threads of a partition meet at a barrier before one of them signals that a record was written or read."""
    # racecheck reports a race on a record's words, because it does not see that the mbarrier orders the accesses
    # (NOTES.md, "Checks on the device"). A partition that reads a record has waited for the full barrier.
    order = RECORD_STEP.findall(attention_of(case).asm["ptx"])
    arrivals = [at for at, what in enumerate(order) if what.startswith("mbarrier.arrive")]
    assert arrivals and all(order[at - 1].startswith("bar") for at in arrivals)
    published = [at for at in arrivals if order[at - 2] == "st.shared"]
    received = [at for at in arrivals if order[at - 2] == "ld.shared"]
    assert published and received and len(published) + len(received) == len(arrivals)
    for at in received:
        begin = max(i for i in range(at - 1) if order[i] != "ld.shared")
        assert order[begin] == "mbarrier.try_wait"


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        *(Case(0, fp8=True), Case(8, heads=(14, 7), head_dim=64, fp8=True)),
        pytest.param(Case(0, head_dim=256, fp8=True), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fp8_stage_is_released_after_its_upcast_is_stored(fake_gpu, case, tmp_path):
    """The upcast warps release an e4m3 stage after they have stored the upcast values of that stage."""
    # An mbarrier arrival does not wait for outstanding loads. A store of the loaded values does, so it must come first.
    cubin = attention_of(case).asm["cubin"]
    (loop,) = [one for one in loops_of(cubin, tmp_path, "STS") if num_instructions("LDS", one)]
    letters = {"LDS": "l", "STS": "s", "SYNCS.ARRIVE": "a"}
    order = "".join(letter for what in loop for name, letter in letters.items() if name in what)
    assert re.fullmatch("(l+s+aa){2}", order), order


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_kernels_of_other_shapes_compile_for_hopper(fake_gpu, case):
    """Hopper kernels compile for e4m3, windows, soft caps, ragged rows, other head sizes and pages without TMA."""
    compile_for(case, 90)
    assert len(fake_gpu.launched) >= 3


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fake_driver", "case"),
    # `support` rejects e4m3 on GPUs older than Ada (sm_89).
    [(arch, case) for arch in (80, 89, 100, 120) for case in (*USUAL, *OTHERS) if arch >= 89 or not case.fp8],
    indirect=["fake_driver"],
    ids=str,
)
def test_kernels_compile_for_other_architectures(fake_gpu, case):
    """Ampere, Ada and Blackwell use the generic kernels, which compile for them."""
    compile_for(case, fake_gpu.get_current_target().arch)
    assert not any("kernels_sm90" in source.fn.__module__ for source, _ in fake_gpu.launched)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "kv_dtype"), [(16, "bfloat16"), (1, "bfloat16"), (16, "float8_e4m3fn")])
def test_kernels_that_write_lse_compile_for_hopper(monkeypatch, tmp_path, page_size, kv_dtype):
    """Every Hopper kernel also compiles with log-sum-exps."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = AttentionShape(32, 8, 128, page_size, kv_dtype=kv_dtype)
    modes = (Mode.EXTEND, Mode.RAGGED_VERIFY)
    geometry = Geometry.create(shape, Limits(2, 4096), DraftShape(1, 1, 4), DeviceProfile("cuda", 90, 132), modes)
    both = kernel_list.kernels_of(geometry, 90, kernel_list.EngineUse(lse=True), trees=False)
    added = [one for one in both if one not in kernel_list.kernels_of(geometry, 90, trees=False)]
    assert len(added) >= 3
    for one in added:
        one.compile()


LIMIT_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""Shared memory of a CTA, in KiB."""


LATENT_ROWS = [
    ((512, 64), 64, "bfloat16", "bfloat16"),
    ((512, 64), 1, "bfloat16", "float8_e4m3fn"),
    ((512, 256), 48, "float16", "float16"),
    ((512, 64), 48, "float32", "float32"),
    ((40, 9), 2, "bfloat16", "bfloat16"),
]
"""Value and rest of a latent row, page size, dtype of q and dtype of the cache."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "row", "page_size", "dtype", "kv_dtype"),
    [
        pytest.param(arch, *case, marks=() if arch == 120 and case is LATENT_ROWS[0] else pytest.mark.slow)
        for arch, case in product(LIMIT_KIB, LATENT_ROWS)
        if arch >= 89 or case[3] != "float8_e4m3fn"
    ],
    ids=str,
)
def test_latent_kernels_compile_within_shared_memory(monkeypatch, tmp_path, arch, row, page_size, dtype, kv_dtype):
    """Every kernel of a latent geometry compiles for each architecture, and its tiles fit in shared memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    value, rest = row
    shape = AttentionShape(
        20, 1, value + rest, page_size, dtype, kv_dtype, softmax_scale=0.1, value_dim=value, latent=True
    )
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(2, 3, 4), DeviceProfile("cuda", arch, 100), modes)
    attention = [one for one in kernel_list.kernels_of(geometry, arch) if one.kernel.__name__.startswith("attend")]
    assert len(attention) >= 3
    for one in attention:
        assert one.compile().metadata.shared <= LIMIT_KIB[arch] << 10, one


@pytest.mark.long
@pytest.mark.parametrize(
    ("arch", "heads"),
    [
        pytest.param(arch, heads, marks=() if (arch, heads) in ((90, 128), (80, 16)) else pytest.mark.slow)
        for arch, heads in product(LIMIT_KIB, (128, 20, 16))
    ],
)
def test_kernels_of_chosen_keys_compile_within_shared_memory(monkeypatch, tmp_path, arch, heads):
    """The kernels of rows with lists compile for each architecture, split and not, and their tiles fit."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = AttentionShape(heads, 1, 576, 64, softmax_scale=0.1, value_dim=512, latent=True, chosen_width=2048)
    modes, device = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY), DeviceProfile("cuda", arch, 100)
    geometry = Geometry.create(shape, Limits(4, 4096), DraftShape(2, 3, 4), device, modes)
    attention = [one for one in kernel_list.kernels_of(geometry, arch) if one.kernel.__name__ == "attend_chosen"]
    assert len(attention) == 2
    for one in attention:
        assert one.compile().metadata.shared <= LIMIT_KIB[arch] << 10, one
