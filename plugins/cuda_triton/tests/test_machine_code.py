"""Machine code of the Hopper kernels: overlap of products and softmax, width of moves, registers that spill."""

from __future__ import annotations

import re

import pytest
import triton

from draftmark_cuda_triton.heuristics import sm90
from plugins.cuda_triton.tests.compiling import (
    Case,
    attention_of,
    config_of,
    loops_of,
    num_instructions,
)

WIDE_PAGES = Case(16, page_size=64, fp8=True, tree=True)


GATHERED_72 = Case(8, page_size=12, head_dim=72, tree=True)


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


WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([012])")


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


@pytest.mark.long
def test_rounded_operands_move_no_bytes_one_by_one(fake_gpu, tmp_path):
    """Products of e4m3 take weights as converted, four in a register, and V is transposed by whole matrices."""
    cubin = attention_of(Case(64, page_size=64, fp8=True, tree=True, rounds=True)).asm["cubin"]
    consumers = loops_of(cubin, tmp_path, "QGMMA")
    assert len(consumers) == 2
    for loop in consumers:
        assert num_instructions("QGMMA", loop) == 8 and not num_instructions("HGMMA", loop)
        assert num_instructions("F2FP.SATFINITE.E4M3.F32", loop) == 32  # each converts two of a thread's 64 weights
        assert num_instructions("PRMT", loop) <= 8
        assert not num_instructions("LDL", loop) and not num_instructions("STL", loop)
    (transposes,) = loops_of(cubin, tmp_path, "LDSM")
    assert num_instructions("LDSM.16.MT88.4", transposes) == num_instructions("STSM.16.M88.4", transposes) == 8
    assert num_instructions("PRMT", transposes) == 32 and not num_instructions("STS.", transposes)
