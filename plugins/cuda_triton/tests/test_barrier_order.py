"""Order of barriers and memory accesses in the PTX of the kernels, which tests of results cannot show."""

from __future__ import annotations

import re

import pytest

from draftmark_cuda_triton.kernel_variants import kernels
from plugins.cuda_triton.tests.compiling import (
    Case,
    attention_of,
    compile_for,
    loops_of,
    num_instructions,
)

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
