"""Every kernel compiles with the Triton that is installed, down to machine code, whether or not a GPU is here.

Gluon is experimental: from Triton 3.6 to 3.9 three of the names that `kernels_sm90` uses changed.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import triton

from draftmark import AttentionShape, DeviceProfile
from draftmark_cuda_triton.heuristics import common, select, sm90
from draftmark_cuda_triton.kernel_variants import kernels
from draftmark_cuda_triton.kv_write import write_kv
from draftmark_cuda_triton.launch import launches, operands, tma

REQS, PAGES, COLUMNS = 2, 4, 8


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for.

    Attributes:
        q_len: rows of a request; 0 for EXTEND.
        tree, ragged: of few rows. split: EXTEND's row tiles are.
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
        """The same, as a geometry says it."""
        name = str(self.dtype).removeprefix("torch.")
        return AttentionShape(
            *self.heads, self.head_dim, self.page_size, q_dtype=name,
            kv_dtype="float8_e4m3fn" if self.fp8 else name, window_left=self.window,
        )  # fmt: skip


USUAL = [
    Case(0),
    Case(0, split=True),
    Case(),
    Case(16, tree=True),
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
    """The tile of neither few requests nor many, which have tiles of other cases."""
    device = DeviceProfile(kind="cuda", arch=arch, num_sms=132)
    return select.select_config(case.shape(), device, case.q_len or 4096, prefill=not case.q_len, num_reqs=20)


def compile_for(case: Case, arch: int, adjacent_heads: bool = True) -> None:
    """Launch what an attention layer launches, over tensors of the CPU that stand for a GPU's.

    Args:
        adjacent_heads: a token's heads lie beside each other; else a head's tokens do.
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
    sinks = torch.ones(case.heads[0]) if case.sinks else None
    config = select.adapt_to_cache(shape, device, config_of(case, arch), True, tma.has_gluon(), adjacent_heads)
    write_kv(new, new, k, v, scale, scale, slots)
    if not case.q_len:
        split = operands.SplitBuffers(4, 32, work, torch.empty(64), torch.empty(64)) if case.split else None
        schedule = (None, work, 4, 32) if case.split else ()
        launches.write_metadata_prefill(fixed, config, rows, lens, indptr, table, slots, work, *schedule)
        launches.attend_prefill(
            fixed, config, rows, q, k, v, scale, scale, lens, indptr, table, work, out, None, sinks, split
        )  # fmt: skip
        return
    extent = operands.BatchExtent(REQS, case.q_len, case.q_len, rows, case.ragged)
    mask = torch.ones(rows, 1, dtype=torch.int32) if case.tree else None
    depth = torch.ones(rows, dtype=torch.int32) if case.tree else None
    partial = torch.empty(64)
    launches.write_metadata_decode_verify(fixed, config, extent, 4, lens, table, slots, work, indptr)
    launches.attend_decode_verify(
        fixed, config, extent, 4, q, k, v, scale, scale, lens, table, mask, depth, work, partial, partial, out, None,
        indptr, sinks=sinks,
    )  # fmt: skip


def attention_of(case: Case):
    """The attention kernel of a case, compiled for Hopper: the only one that is, for `fake_gpu` knows none before."""
    compile_for(case, 90)
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


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_kernels_compile_for_hopper(fake_gpu, case):
    """Those of the copy engine and wgmma, and what every layer launches beside them."""
    compile_for(case, 90)
    names = [source.fn.__name__ for source, _ in fake_gpu.launched]
    assert names[0] == "write_kv_rows" and any(name.startswith("attend_") for name in names)
    assert "kernels_sm90" in next(
        source.fn.__module__ for source, _ in fake_gpu.launched if "attend" in source.fn.__name__
    )


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(1, heads=(64, 8), head_dim=64), "attend_decode_verify"),
        (Case(4, heads=(16, 4), head_dim=96), "attend_decode_verify"),
        (Case(1, heads=(16, 8), head_dim=80), "attend_decode_verify_gather"),
        (Case(1, heads=(64, 8), head_dim=64, fp8=True), "attend_decode_verify"),
        (Case(1, heads=(16, 8), head_dim=80, fp8=True), "attend_decode_verify_fp8"),
    ],
    ids=str,
)
def test_kernels_compile_for_non_adjacent_heads(fake_gpu, case, name):
    """Those that are worked on in pairs where they lie beside each other."""
    compile_for(case, 90, adjacent_heads=False)
    assert name in [source.fn.__name__ for source, _ in fake_gpu.launched]


@pytest.mark.parametrize(("reqs", "rows"), [(2, 70), (40, 40), (3, 900), (100, 300)])
def test_schedules_of_any_size_compile(fake_gpu, reqs, rows):
    """Of more requests than row tiles in a vector, as many, and fewer."""
    config = config_of(Case(0), 90)
    lens, indptr = torch.ones(reqs, dtype=torch.int32), torch.ones(reqs + 1, dtype=torch.int32)
    table, slots = torch.ones(reqs, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    tiles, work = torch.ones(4096, dtype=torch.int32), torch.ones(4096, dtype=torch.int32)
    shape = operands.AttentionParams(8, 4, 128, 16, 0.1)
    for schedule in ((), (None, work, 16, 132)):
        launches.write_metadata_prefill(shape, config, rows, lens, indptr, table, slots, tiles, *schedule)
    extent = operands.BatchExtent(reqs, 3, 3, rows, ragged=True)
    launches.write_metadata_decode_verify(shape, config, extent, 33, lens, table, slots, work, indptr)
    assert [source.fn.__name__ for source, _ in fake_gpu.launched] == ["write_metadata_prefill"] * 2 + [
        "write_metadata_decode_verify"
    ]


@pytest.mark.parametrize(
    ("fake_driver", "dtype"),
    [*((arch, torch.bfloat16) for arch in (80, 90, 100)), (80, torch.float32)],
    ids=lambda value: str(value).removeprefix("torch."),
    indirect=["fake_driver"],
)
def test_soft_cap_is_one_instruction_for_16_bit_rows(fake_gpu, fake_driver, dtype):
    """In the kernels of other GPUs than Hopper, and of heads that are too narrow for its own; float32 is exact."""
    case = Case(16, heads=(8, 2), head_dim=32, dtype=dtype, tree=True, cap=50.0)
    compile_for(case, fake_driver._arch)
    caches = kernels.decode_verify.attend_decode_verify.device_caches.values()
    (binary,) = [one for cache, *_ in caches for one in cache.values()]
    assert ("tanh.approx.f32" in binary.asm["ptx"]) == (dtype is torch.bfloat16)


ACCESS = re.compile(r"griddepcontrol\.(?:wait|launch_dependents)|(?:ld|st|red|atom)\.global|cp\.async")

CASES_OF_GRIDS = {
    Case(): "attend_decode_verify",
    Case(16, tree=True): "attend_decode_verify",
    Case(3, ragged=True): "attend_decode_verify",
    Case(1, page_size=4): "attend_decode_verify_gather",
    Case(1, page_size=4, fp8=True): "attend_decode_verify",
    Case(fp8=True): "attend_decode_verify_fp8",
    Case(0, split=True): "attend_prefill",
    Case(0, page_size=4, split=True): "attend_prefill_gather",
}


@pytest.mark.parametrize("case", CASES_OF_GRIDS, ids=str)
def test_grid_waits_for_the_previous_grid(fake_gpu, case):
    """Grids overlap: rows are written, and attention touches memory, behind a wait, and the next grid is let begin no
    earlier; the merge reads the schedule before.
    """
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
    assert {name for name, _ in found} >= {CASES_OF_GRIDS[case], "combine_splits", "write_kv_rows"}
    for (name, _), one in found.items():
        order = ACCESS.findall(one.asm["ptx"])
        wait = order.index("griddepcontrol.wait")
        assert one.metadata.launch_pdl
        assert order[wait + 1] == "griddepcontrol.launch_dependents", name
        assert order.count("griddepcontrol.launch_dependents") == 1, name
        assert wait == 0 if name != "combine_splits" else "st.global" not in order[:wait], name


@pytest.mark.parametrize(
    "case",
    [Case(1, head_dim=104), Case(0, head_dim=104), Case(16, head_dim=120, tree=True), Case(4, fp8=True)],
    ids=str,
)
def test_rows_move_16_bytes_at_a_time(fake_gpu, case):
    """Of heads of any multiple of 8 elements: Triton sees for itself where a row's stride is a multiple of 16 alone."""
    ptx = attention_of(case).asm["ptx"]
    assert not re.search(r"(?:ld|st)\.global[.\w]*\.[bu]16\b", ptx)
    assert "st.global.v4.b32" in ptx and ("ld.global.v4.b32" in ptx or case.fp8)


STEP = re.compile(r"mbarrier\.try_wait|fence\.proxy\.async|wgmma\.mma_async")
COPY = re.compile(r"cp\.async\.c[ag]\.shared\.global .*")
COPY_OR_ARRIVE = re.compile(r"cp\.async\.(?:c[ag]\.shared\.global|mbarrier\.arrive)")


@pytest.mark.parametrize(
    "case", [Case(page_size=1), Case(8, page_size=12, head_dim=72, tree=True), Case(head_dim=160)], ids=str
)
def test_gathered_keys_are_copied_by_16_bytes_and_fenced(fake_gpu, case):
    """No copy falls apart into elements, every thread arrives uncounted, and no product reads a tile before a fence."""
    ptx, config = attention_of(case).asm["ptx"], config_of(case, 90)
    copies = COPY.findall(ptx)
    assert (
        len(copies)
        == 2 * config.block_n * 2 * sum(sm90.split_head_dim(config.kv_heads_per_tile * case.head_dim)) // 16 // 128
    )
    assert all(".cg." in copy and "0x10" in copy for copy in copies)
    assert ptx.count("cp.async.mbarrier.arrive.noinc") == ptx.count("cp.async.mbarrier.arrive")
    # Behind its copies, of K and of V; folding threads arrive so where they have copied nothing.
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
    """The innermost loops of machine code that have an instruction of a name: all of their instructions."""
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
    return [loop for loop in loops if counted(name, loop)]


@pytest.mark.parametrize(
    "case",
    [
        *(Case(0, page_size=64), Case(64, tree=True), Case(16, tree=True), Case(0, head_dim=160)),
        *(Case(0, heads=(32, 16), cap=50.0), Case(64, tree=True, window=1000)),
        *(Case(16, heads=(40, 8), tree=True), Case(16, heads=(40, 8), tree=True, window=100)),
    ],
    ids=str,
)
def test_softmax_overlaps_wgmma(fake_gpu, case, tmp_path):
    """The machine code asks for scores and for sums at once, waits for the scores, works out a tile's weights, and only
    then waits for the sums in flight, of both parts if columns have two (`softmax.order_before_wait`,
    `softmax.pack_pairs`). A group has one such loop, of tiles that are masked and of those that are not, or two
    (`config.has_unmasked_loop`).
    """
    widths = [width for width in sm90.split_head_dim(case.head_dim) if width]
    config = config_of(case, 90)
    products = sum(widths) // 16 + len(widths) * config.block_n // 16
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    apart = (config.num_consumer_wgs, config.block_n) == (2, 64) and case.window < 0
    assert len(loops) == config.num_consumer_wgs * (1 + apart)
    for loop in loops:
        waits = [n for n, what in enumerate(loop) if "DEPBAR" in what]
        assert [WAIT.search(loop[n])[1] for n in waits] == [str(len(widths)), "0"]
        calls, weighed, added = loop[: waits[0]], loop[waits[0] : waits[1]], loop[waits[1] :]
        assert [counted("HGMMA", part) for part in (calls, weighed, added)] == [products, 0, 0]
        assert counted("MUFU.EX2", weighed) == counted("MUFU.EX2", loop) >= config.block_n // 2
        assert counted("PRMT", calls) < 8, "pairs of weights are swapped between the products"


COMPARED = re.compile(r"FMNMX (R\d+), (R\d+), (R\d+)")


@pytest.mark.parametrize(
    "case", [Case(0, page_size=64), Case(64, tree=True), Case(8, heads=(64, 8), head_dim=64)], ids=str
)
def test_row_max_is_a_balanced_reduction(fake_gpu, case, tmp_path):
    """A thread's 64 scores of a tile are compared, and the lanes' of a row, in few steps that wait for each other."""
    for loop in loops_of(attention_of(case).asm["cubin"], tmp_path):
        steps: dict[str, int] = {}
        deepest = 0
        for what in loop:
            if found := COMPARED.search(what):
                steps[found[1]] = 1 + max(steps.get(one, 0) for one in found.groups()[1:])
                deepest = max(deepest, steps[found[1]])
            elif named := re.match(r"(?:@!?U?P\d+ )?[A-Z0-9.]+ (R\d+),", what):
                steps.pop(named[1], None)
        assert counted("FMNMX", loop) >= 64 and 5 < deepest <= 12


@pytest.mark.parametrize(
    ("case", "most"),
    [(Case(64, tree=True), 1), (Case(0), 1), (Case(16, tree=True), 1), (Case(1, fp8=True), 5)],
    ids=str,
)
def test_each_consumer_thread_releases_a_stage(fake_gpu, case, most, tmp_path):
    """Twice a tile, K and V, and no barrier of the group before either. A row over e4m3 has two a tile for its
    weights, one or two where the pivot moves, and one for masks.
    """
    for loop in loops_of(attention_of(case).asm["cubin"], tmp_path):
        assert counted("ARRIVES.LDGSTSBAR", loop) == 2
        assert counted("0x80", [what for what in loop if "BAR.SYNC" in what]) <= most


@pytest.mark.parametrize(
    "case",
    [Case(16, fp8=True, tree=True), Case(16, page_size=64, fp8=True, tree=True), Case(page_size=64, fp8=True)],
    ids=str,
)
def test_register_upcast_spills_almost_nothing(fake_gpu, case, tmp_path):
    """Neither in the loop of clear tiles nor in that of masked ones: nothing, and with Triton 3.7 one value of a tree.
    Pages of 64 come in boxes of 32 for it.
    """
    most = int(triton.__version__.startswith("3.7."))
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    assert len(loops) == 2
    assert all(counted(name, loop) <= most for loop in loops for name in ("LDL", "STL"))


def counted(name, code):
    """How many instructions have a name."""
    return sum(name in what for what in code)


BARRIER = re.compile(r"(?:barrier|bar)\.\S+\s+(.*);")
"""In PTX: its number, and of how many threads, where that is not of all."""
ROLE_READ = re.compile(r"ld\.shared\.[bu]8\s.*\+(\d+)\]")
SHARED_WRITE = re.compile(r"st\.shared\S*\s+\[global_smem\+(\d+)\]")
MOST_WARPS = 32


@pytest.mark.parametrize(
    "case",
    [
        *(Case(), Case(64, tree=True), Case(0), Case(0, fp8=True), Case(16, fp8=True, tree=True)),
        *(Case(16, page_size=4, tree=True), Case(0, page_size=1)),
    ],
    ids=str,
)
def test_partition_ids_are_published_between_cta_barriers(fake_gpu, case):
    """racecheck reports those bytes, in which it sees no such barrier (NOTES.md, checks on the device). The compiler
    reads them in one place; it writes them to tell who does what, and that there is no more to do once all have met.
    """
    code = [line.strip() for line in attention_of(case).asm["ptx"].splitlines()]
    met = [(at, found[1]) for at, line in enumerate(code) if (found := BARRIER.match(line))]
    ((read, first),) = [(at, int(found[1])) for at, line in enumerate(code) if (found := ROLE_READ.match(line))]
    written = [
        at for at, line in enumerate(code)
        if (found := SHARED_WRITE.match(line)) and first <= int(found[1]) < first + MOST_WARPS
    ]  # fmt: skip
    behind = {min(other for other in met if other[0] > at) for at in written}
    assert len(behind) == 2 and {threads for _, threads in behind} == {"1"}
    assert max(other for other in met if other[0] < read)[1] == "1"
    assert max(other for other in met if other[0] < max(written))[1] == "1"


@pytest.mark.parametrize("case", [Case(0, page_size=64), Case(0, page_size=1)], ids=str)
def test_work_tile_is_read_before_it_is_overwritten(fake_gpu, case):
    """Every role that hears of its next row tile says so behind a branch on what it has read
    (`tile_scheduler.receive`).
    """
    ptx = attention_of(case).asm["ptx"]
    record = re.compile(r"ld\.shared\.v4\.b32.*?mbarrier\.arrive", re.DOTALL)
    heard = [one[0] for one in record.finditer(ptx) if "bra" in one[0] and one[0].count("\n") < 90]
    # Twice each: V's fetching warp where there is one, and two folding groups.
    assert len(heard) == 2 * (3 if case.page_size > 1 else 2)
    for one in heard:
        read = {name for row in re.findall(r"ld\.shared\.v4\.b32\s+\{(.*?)\}", one) for name in row.split(", ")}
        sums = {to: {a, b} for to, a, b in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+);", one)}
        tests = dict(re.findall(r"setp\.\w+\.s32\s+(%p\d+), (%r\d+),", one))
        calls = {tests[branch] for branch in re.findall(r"@!?(%p\d+) bra", one)}
        for _ in range(8):
            calls = {part for name in calls for part in sums.get(name, {name})}
        assert calls == read and len(read) == 8


TELLING = re.compile(r"(?:st|ld)\.shared|(?:barrier|bar)\.\S+|mbarrier\.(?:arrive\.shared::cta\.b64|try_wait)")


@pytest.mark.parametrize("case", [Case(0, page_size=64), Case(0, page_size=1), Case(0, split=True)], ids=str)
def test_work_tile_is_published_after_its_fields_are_written(fake_gpu, case):
    """racecheck reports an item's words, in whose barrier it sees no order (NOTES.md, checks on the device). Before one
    thread arrives for its role, the role's threads meet; who reads has waited for that barrier.
    """
    order = TELLING.findall(attention_of(case).asm["ptx"])
    arrivals = [at for at, what in enumerate(order) if what.startswith("mbarrier.arrive")]
    assert arrivals and all(order[at - 1].startswith("bar") for at in arrivals)
    options = [at for at in arrivals if order[at - 2] == "st.shared"]
    heard = [at for at in arrivals if order[at - 2] == "ld.shared"]
    assert options and heard and len(options) + len(heard) == len(arrivals)
    for at in heard:
        begin = max(i for i in range(at - 1) if order[i] != "ld.shared")
        assert order[begin] == "mbarrier.try_wait"


@pytest.mark.parametrize(
    "case", [Case(0, fp8=True), Case(8, heads=(14, 7), head_dim=64, fp8=True), Case(0, head_dim=256, fp8=True)], ids=str
)
def test_fp8_stage_is_released_after_its_upcast_is_stored(fake_gpu, case, tmp_path):
    """Who widens e4m3 gives a tile back behind the stores of what was read of it: a barrier waits for no load."""
    (loop,) = [one for one in loops_of(attention_of(case).asm["cubin"], tmp_path, "STS") if counted("LDS", one)]
    letters = {"LDS": "l", "STS": "s", "SYNCS.ARRIVE": "a"}
    order = "".join(letter for what in loop for name, letter in letters.items() if name in what)
    assert re.fullmatch("(l+s+aa){2}", order), order


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_kernels_of_other_shapes_compile_for_hopper(fake_gpu, case):
    """fp8 that is widened, windows, soft caps, ragged rows, heads of 64, 96 and 256, and what has no box."""
    compile_for(case, 90)
    assert len(fake_gpu.launched) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fake_driver", "case"),
    # `support` refuses e4m3 before Ada.
    [(arch, case) for arch in (80, 89, 100, 120) for case in (*USUAL, *OTHERS) if arch >= 89 or not case.fp8],
    indirect=["fake_driver"],
    ids=str,
)
def test_kernels_compile_for_other_architectures(fake_gpu, case):
    """Ampere, Ada and Blackwell run `kernels`."""
    compile_for(case, fake_gpu.get_current_target().arch)
    assert not any("kernels_sm90" in source.fn.__module__ for source, _ in fake_gpu.launched)
