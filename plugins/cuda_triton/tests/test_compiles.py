"""Every kernel compiles with the Triton that is installed, down to machine code, whether or not a GPU is here.

Gluon is experimental: from Triton 3.6 to 3.9 three of the names that `hopper` uses changed.
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
from draftmark_cuda_triton import boxes, flavours, launch, tiling
from draftmark_cuda_triton.writing import write_kv

REQS, PAGES, COLUMNS = 2, 4, 8


@dataclass(frozen=True)
class Case:
    """What a kernel is compiled for.

    Attributes:
        q_len: rows of a request; 0 for EXTEND.
        tree, ragged: of few rows. cut: EXTEND's row tiles are.
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
    cut: bool = False

    def shape(self) -> AttentionShape:
        """The same, as a geometry says it."""
        name = str(self.dtype).removeprefix("torch.")
        return AttentionShape(
            *self.heads, self.head_dim, self.page_size, q_dtype=name, kv_dtype="float8_e4m3fn" if self.fp8 else name,
            window_left=self.window,
        )  # fmt: skip


USUAL = [
    Case(0),
    Case(0, cut=True),
    Case(),
    Case(16, tree=True),
    Case(1, heads=(64, 8), head_dim=64, window=127, sinks=True),
    Case(page_size=64, fp8=True),
    Case(page_size=1),
    Case(16, page_size=4, tree=True),
]
OTHERS = [
    Case(0, page_size=1, cut=True),
    Case(0, heads=(64, 8), head_dim=64, sinks=True, cut=True),
    Case(0, heads=(16, 4), head_dim=256, page_size=64, cut=True),
    Case(0, heads=(32, 8), head_dim=160, window=100, cap=30.0, cut=True),
    Case(0, fp8=True, cut=True),
    Case(0, dtype=torch.float32, cut=True),
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


def tile_of(case: Case, arch: int) -> tiling.Tile:
    """The tile of neither few requests nor many, which have tiles of other cases."""
    device = DeviceProfile(kind="cuda", arch=arch, num_sms=132)
    return tiling.choose(case.shape(), device, case.q_len or 4096, extend=not case.q_len, num_reqs=20)


def compile_for(case: Case, arch: int, beside: bool = True) -> None:
    """Launch what an attention layer launches, over tensors of the CPU that stand for a GPU's.

    Args:
        beside: a token's heads lie beside each other; else a head's tokens do.
    """
    shape, device = case.shape(), DeviceProfile(kind="cuda", arch=arch, num_sms=132)
    fixed = launch.Attention(
        shape.num_kv_heads, shape.group_size, case.head_dim, case.page_size, 0.1, case.cap, case.window, pdl=arch >= 90
    )
    rows = REQS * max(case.q_len, 1)
    kv = torch.float8_e4m3fn if case.fp8 else case.dtype
    k, v = torch.empty(2, PAGES, case.page_size, shape.num_kv_heads, case.head_dim, dtype=kv)
    if not beside:
        k, v = (one.transpose(1, 2).contiguous().transpose(1, 2) for one in (k, v))
    q, new = (torch.empty(rows, heads, case.head_dim, dtype=case.dtype) for heads in case.heads)
    out, scale = torch.empty_like(q), torch.ones(1) if case.fp8 else None
    lens, indptr = torch.ones(REQS, dtype=torch.int32), torch.ones(REQS + 1, dtype=torch.int32)
    table, slots = torch.ones(REQS, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    work = torch.ones(4096, dtype=torch.int32)
    sinks = torch.ones(case.heads[0]) if case.sinks else None
    tile = tiling.for_cache(shape, device, tile_of(case, arch), True, boxes.available(), beside)
    write_kv(new, new, k, v, scale, scale, slots)
    if not case.q_len:
        cut = launch.Cut(4, 32, work, torch.empty(64), torch.empty(64)) if case.cut else None
        schedule = (None, work, 4, 32) if case.cut else ()
        launch.write_metadata_ragged(fixed, tile, rows, lens, indptr, table, slots, work, *schedule)
        launch.attend_extend(
            fixed, tile, rows, q, k, v, scale, scale, lens, indptr, table, work, out, None, sinks, cut
        )  # fmt: skip
        return
    extent = launch.Extent(REQS, case.q_len, case.q_len, rows, case.ragged)
    mask = torch.ones(rows, 1, dtype=torch.int32) if case.tree else None
    depth = torch.ones(rows, dtype=torch.int32) if case.tree else None
    partial = torch.empty(64)
    launch.write_metadata(fixed, tile, extent, 4, lens, table, slots, work, indptr)
    launch.attend(
        fixed, tile, extent, 4, q, k, v, scale, scale, lens, table, mask, depth, work, partial, partial, out, None,
        indptr, sinks=sinks,
    )  # fmt: skip


def attention_of(case: Case):
    """The attention kernel of a case, compiled for Hopper: the only one that is, for `compiled` knows none before."""
    compile_for(case, 90)
    hopper = boxes.hopper()
    kernels = (
        *(hopper.extend.attend_ragged, hopper.uniform.attend_uniform, hopper.narrow.attend_narrow),
        *(hopper.gathered.attend_gathered, hopper.gathered.attend_gathered_ragged),
    )
    (binary,) = [one for kernel in kernels for caches in kernel.device_caches.values() for one in caches[0].values()]
    return binary


@pytest.mark.parametrize("case", USUAL, ids=str)
def test_kernels_compile_for_hopper(compiled, case):
    """Those of the copy engine and wgmma, and what every layer launches beside them."""
    compile_for(case, 90)
    names = [source.fn.__name__ for source, _ in compiled.launched]
    assert names[0] == "write_rows" and any(name.startswith("attend_") for name in names)
    assert "hopper" in next(source.fn.__module__ for source, _ in compiled.launched if "attend" in source.fn.__name__)


@pytest.mark.parametrize(
    ("case", "name"),
    [
        (Case(1, heads=(64, 8), head_dim=64), "attend_uniform"),
        (Case(4, heads=(16, 4), head_dim=96), "attend_uniform"),
        (Case(1, heads=(16, 8), head_dim=80), "attend_gathered"),
        (Case(1, heads=(64, 8), head_dim=64, fp8=True), "attend_uniform"),
        (Case(1, heads=(16, 8), head_dim=80, fp8=True), "attend_narrow"),
    ],
    ids=str,
)
def test_heads_that_lie_apart_have_kernels_too(compiled, case, name):
    """Those that are worked on in pairs where they lie beside each other."""
    compile_for(case, 90, beside=False)
    assert name in [source.fn.__name__ for source, _ in compiled.launched]


@pytest.mark.parametrize(("reqs", "rows"), [(2, 70), (40, 40), (3, 900), (100, 300)])
def test_schedules_of_any_size_compile(compiled, reqs, rows):
    """Of more requests than row tiles in a vector, as many, and fewer."""
    tile = tile_of(Case(0), 90)
    lens, indptr = torch.ones(reqs, dtype=torch.int32), torch.ones(reqs + 1, dtype=torch.int32)
    table, slots = torch.ones(reqs, COLUMNS, dtype=torch.int32), torch.ones(rows, dtype=torch.int64)
    tiles, work = torch.ones(4096, dtype=torch.int32), torch.ones(4096, dtype=torch.int32)
    shape = launch.Attention(8, 4, 128, 16, 0.1)
    for schedule in ((), (None, work, 16, 132)):
        launch.write_metadata_ragged(shape, tile, rows, lens, indptr, table, slots, tiles, *schedule)
    extent = launch.Extent(reqs, 3, 3, rows, ragged=True)
    launch.write_metadata(shape, tile, extent, 33, lens, table, slots, work, indptr)
    assert [source.fn.__name__ for source, _ in compiled.launched] == ["write_ragged"] * 2 + ["write_uniform"]


@pytest.mark.parametrize(
    ("no_gpu", "dtype"),
    [*((arch, torch.bfloat16) for arch in (80, 90, 100)), (80, torch.float32)],
    ids=lambda value: str(value).removeprefix("torch."),
    indirect=["no_gpu"],
)
def test_a_soft_cap_is_one_instruction_where_rows_have_16_bits(compiled, no_gpu, dtype):
    """In the kernels of other GPUs than Hopper, and of heads that are too narrow for its own; float32 is exact."""
    case = Case(16, heads=(8, 2), head_dim=32, dtype=dtype, tree=True, cap=50.0)
    compile_for(case, no_gpu._arch)
    caches = flavours._load(flavours.OWN, False).uniform.attend_uniform.device_caches.values()
    (binary,) = [one for cache, *_ in caches for one in cache.values()]
    assert ("tanh.approx.f32" in binary.asm["ptx"]) == (dtype is torch.bfloat16)


ACCESS = re.compile(r"griddepcontrol\.(?:wait|launch_dependents)|(?:ld|st|red|atom)\.global|cp\.async")

CASES_OF_GRIDS = {
    Case(): "attend_uniform",
    Case(16, tree=True): "attend_uniform",
    Case(3, ragged=True): "attend_uniform",
    Case(1, page_size=4): "attend_gathered",
    Case(1, page_size=4, fp8=True): "attend_uniform",
    Case(fp8=True): "attend_narrow",
    Case(0, cut=True): "attend_ragged",
    Case(0, page_size=4, cut=True): "attend_gathered_ragged",
}


@pytest.mark.parametrize("case", CASES_OF_GRIDS, ids=str)
def test_a_grid_waits_for_the_one_before_it(compiled, case):
    """Grids overlap: rows are written, and attention touches memory, behind a wait, and the next grid is let begin no
    earlier; the merge reads the schedule before.
    """
    compile_for(case, 90)
    found = {}
    for module in (flavours._load(flavours.OWN, False), boxes.hopper()):
        for kernel in (
            module.uniform.attend_uniform,
            *(module.extend.attend_ragged,),
            *([module.narrow.attend_narrow, module.gathered.attend_gathered] if hasattr(module, "narrow") else []),
            *([module.gathered.attend_gathered_ragged] if hasattr(module, "gathered") else []),
            *([module.merge.merge_pieces, module.kv_write.write_rows] if hasattr(module, "merge") else []),
        ):
            for cache, *_ in kernel.device_caches.values():
                found |= {(one.name, one.hash): one for one in cache.values()}
    assert {name for name, _ in found} >= {CASES_OF_GRIDS[case], "merge_pieces", "write_rows"}
    for (name, _), one in found.items():
        order = ACCESS.findall(one.asm["ptx"])
        wait = order.index("griddepcontrol.wait")
        assert one.metadata.launch_pdl
        assert order[wait + 1] == "griddepcontrol.launch_dependents", name
        assert order.count("griddepcontrol.launch_dependents") == 1, name
        assert wait == 0 if name != "merge_pieces" else "st.global" not in order[:wait], name


@pytest.mark.parametrize(
    "case",
    [Case(1, head_dim=104), Case(0, head_dim=104), Case(16, head_dim=120, tree=True), Case(4, fp8=True)],
    ids=str,
)
def test_rows_move_16_bytes_at_a_time(compiled, case):
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
def test_gathered_keys_come_16_bytes_at_a_time_and_are_fenced(compiled, case):
    """No copy falls apart into elements, every thread arrives uncounted, and no product reads a tile before a fence."""
    ptx, tile = attention_of(case).asm["ptx"], tile_of(case, 90)
    copies = COPY.findall(ptx)
    assert len(copies) == 2 * tile.block_n * 2 * sum(tiling.columns(tile.heads * case.head_dim)) // 16 // 128
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
def test_exponentials_run_beside_a_product(compiled, case, tmp_path):
    """The machine code asks for scores and for sums at once, waits for the scores, works out a tile's weights, and only
    then waits for the sums in flight, of both parts if columns have two (`softmax.settled`, `softmax.paired`). A group
    has one such loop, of tiles that are masked and of those that are not, or two (`constants.parts_loops`).
    """
    widths = [width for width in tiling.columns(case.head_dim) if width]
    tile = tile_of(case, 90)
    products = sum(widths) // 16 + len(widths) * tile.block_n // 16
    loops = loops_of(attention_of(case).asm["cubin"], tmp_path)
    apart = (tile.members, tile.block_n) == (2, 64) and case.window < 0
    assert len(loops) == tile.members * (1 + apart)
    for loop in loops:
        waits = [n for n, what in enumerate(loop) if "DEPBAR" in what]
        assert [WAIT.search(loop[n])[1] for n in waits] == [str(len(widths)), "0"]
        asked, weighed, added = loop[: waits[0]], loop[waits[0] : waits[1]], loop[waits[1] :]
        assert [counted("HGMMA", part) for part in (asked, weighed, added)] == [products, 0, 0]
        assert counted("MUFU.EX2", weighed) == counted("MUFU.EX2", loop) >= tile.block_n // 2
        assert counted("PRMT", asked) < 8, "pairs of weights are swapped between the products"


COMPARED = re.compile(r"FMNMX (R\d+), (R\d+), (R\d+)")


@pytest.mark.parametrize(
    "case", [Case(0, page_size=64), Case(64, tree=True), Case(8, heads=(64, 8), head_dim=64)], ids=str
)
def test_scores_are_compared_side_by_side(compiled, case, tmp_path):
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
def test_threads_of_a_group_give_a_tile_back_one_by_one(compiled, case, most, tmp_path):
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
def test_nearly_nothing_is_spilled_where_keys_are_widened_in_registers(compiled, case, tmp_path):
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
def test_roles_are_told_and_read_between_barriers_of_all_threads(compiled, case):
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
def test_an_item_is_read_before_it_may_be_overwritten(compiled, case):
    """Every role that hears of its next row tile says so behind a branch on what it has read (`agenda.hear_next`)."""
    ptx = attention_of(case).asm["ptx"]
    record = re.compile(r"ld\.shared\.v4\.b32.*?mbarrier\.arrive", re.DOTALL)
    heard = [one[0] for one in record.finditer(ptx) if "bra" in one[0] and one[0].count("\n") < 90]
    # Twice each: V's fetching warp where there is one, and two folding groups.
    assert len(heard) == 2 * (3 if case.page_size > 1 else 2)
    for one in heard:
        read = {name for row in re.findall(r"ld\.shared\.v4\.b32\s+\{(.*?)\}", one) for name in row.split(", ")}
        sums = {to: {a, b} for to, a, b in re.findall(r"add\.s32\s+(%r\d+), (%r\d+), (%r\d+);", one)}
        tests = dict(re.findall(r"setp\.\w+\.s32\s+(%p\d+), (%r\d+),", one))
        asked = {tests[branch] for branch in re.findall(r"@!?(%p\d+) bra", one)}
        for _ in range(8):
            asked = {part for name in asked for part in sums.get(name, {name})}
        assert asked == read and len(read) == 8


TELLING = re.compile(r"(?:st|ld)\.shared|(?:barrier|bar)\.\S+|mbarrier\.(?:arrive\.shared::cta\.b64|try_wait)")


@pytest.mark.parametrize("case", [Case(0, page_size=64), Case(0, page_size=1), Case(0, cut=True)], ids=str)
def test_an_item_is_told_when_all_of_it_is_written_and_read_when_it_is_told(compiled, case):
    """racecheck reports an item's words, in whose barrier it sees no order (NOTES.md, checks on the device). Before one
    thread arrives for its role, the role's threads meet; who reads has waited for that barrier.
    """
    order = TELLING.findall(attention_of(case).asm["ptx"])
    arrivals = [at for at, what in enumerate(order) if what.startswith("mbarrier.arrive")]
    assert arrivals and all(order[at - 1].startswith("bar") for at in arrivals)
    told = [at for at in arrivals if order[at - 2] == "st.shared"]
    heard = [at for at in arrivals if order[at - 2] == "ld.shared"]
    assert told and heard and len(told) + len(heard) == len(arrivals)
    for at in heard:
        begin = max(i for i in range(at - 1) if order[i] != "ld.shared")
        assert order[begin] == "mbarrier.try_wait"


@pytest.mark.parametrize(
    "case", [Case(0, fp8=True), Case(8, heads=(14, 7), head_dim=64, fp8=True), Case(0, head_dim=256, fp8=True)], ids=str
)
def test_narrow_keys_are_left_when_they_have_been_written(compiled, case, tmp_path):
    """Who widens e4m3 gives a tile back behind the stores of what was read of it: a barrier waits for no load."""
    (loop,) = [one for one in loops_of(attention_of(case).asm["cubin"], tmp_path, "STS") if counted("LDS", one)]
    letters = {"LDS": "l", "STS": "s", "SYNCS.ARRIVE": "a"}
    order = "".join(letter for what in loop for name, letter in letters.items() if name in what)
    assert re.fullmatch("(l+s+aa){2}", order), order


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_kernels_of_other_shapes_compile_for_hopper(compiled, case):
    """fp8 that is widened, windows, soft caps, ragged rows, heads of 64, 96 and 256, and what has no box."""
    compile_for(case, 90)
    assert len(compiled.launched) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("no_gpu", "case"),
    # `support` refuses e4m3 before Ada.
    [(arch, case) for arch in (80, 89, 100, 120) for case in (*USUAL, *OTHERS) if arch >= 89 or not case.fp8],
    indirect=["no_gpu"],
    ids=str,
)
def test_kernels_compile_for_other_architectures(compiled, case):
    """Ampere, Ada and Blackwell run `kernels`."""
    compile_for(case, compiled.get_current_target().arch)
    assert not any("hopper" in source.fn.__module__ for source, _ in compiled.launched)
