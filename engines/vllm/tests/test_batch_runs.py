"""Tests of the function that splits a step into runs of requests with one mode."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from draftmark import AttentionShape, DeviceProfile, DraftShape, Geometry, Limits, Mode
from draftmark_vllm.batch_runs import BatchRun, block_run, joined_run, split_decodes_prefills


def split(lens: list[int], *, padding: int = 0, num_rows: int | None = None, verify: int = 5, ragged: bool = True):
    """Split a step of requests with these rows and of `padding` padding requests."""
    start = [*accumulate(lens, initial=0)]
    start += [start[-1]] * padding
    return list(split_decodes_prefills(tuple(start), start[-1] if num_rows is None else num_rows, verify, ragged))


def test_equal_splits_are_cached() -> None:
    """Calls with equal arguments return one cached, immutable object, because uniform steps recur often."""
    again = [split_decodes_prefills((0, 5, 10), 10, 5, True) for _ in range(2)]
    assert again[0] is again[1] and isinstance(again[0], tuple)


def test_decodes_are_one_run() -> None:
    """Requests with one row form one DECODE run."""
    assert split([1, 1, 1]) == [BatchRun(Mode.DECODE, 0, 0, 3, (1, 1, 1))]


def test_verifies_are_one_run() -> None:
    """Requests that all have the rows of a verify step (a root and its drafts) form one VERIFY run."""
    assert split([5, 5]) == [BatchRun(Mode.VERIFY, 0, 0, 2, (5, 5))]


def test_uneven_rows_are_one_ragged_run() -> None:
    """Requests with different row counts, none above a verify step's, form one RAGGED_VERIFY run."""
    assert split([5, 1, 2]) == [BatchRun(Mode.RAGGED_VERIFY, 0, 0, 3, (5, 1, 2))]


def test_uneven_rows_extend_without_ragged_verify() -> None:
    """Without RAGGED_VERIFY, leading requests of one row become DECODE, and all later requests become EXTEND."""
    assert split([1, 1, 3, 1], ragged=False) == [
        BatchRun(Mode.DECODE, 0, 0, 2, (1, 1)),
        BatchRun(Mode.EXTEND, 2, 2, 2, (3, 1)),
    ]
    assert split([3, 1], ragged=False) == [BatchRun(Mode.EXTEND, 0, 0, 2, (3, 1))]


def test_mixed_step_is_two_runs() -> None:
    """Decodes and verifies before the first longer request form a run; all later requests form another."""
    assert split([5, 5, 30, 2]) == [BatchRun(Mode.VERIFY, 0, 0, 2, (5, 5)), BatchRun(Mode.EXTEND, 2, 10, 2, (30, 2))]
    assert [one.mode for one in split([1, 4, 64])] == [Mode.RAGGED_VERIFY, Mode.EXTEND]


@pytest.mark.parametrize(("rows", "mode"), [(1, Mode.DECODE), (5, Mode.VERIFY)])
def test_padding_requests_of_a_graph_have_rows(rows: int, mode: Mode) -> None:
    """vLLM gives padding requests no rows, but the run gives each one the rows that its graph was captured with."""
    assert split([rows] * 3, padding=5, num_rows=8 * rows) == [BatchRun(mode, 0, 0, 3, (rows,) * 8)]


def test_padding_without_rows_is_left_out() -> None:
    """A run leaves out the padding requests if the step has no rows for them."""
    assert split([1, 1], padding=2, num_rows=2) == [BatchRun(Mode.DECODE, 0, 0, 2, (1, 1))]
    assert split([30], padding=2) == [BatchRun(Mode.EXTEND, 0, 0, 1, (30,))]


def test_surplus_rows_belong_to_no_run() -> None:
    """Rows after the last request belong to no run."""
    (one,) = split([5, 2], num_rows=16)
    assert one.num_rows == 7


def test_step_without_rows_has_no_run() -> None:
    """The split of a step without rows is empty. An idle rank runs such a step."""
    assert split([], padding=2) == []


def test_block_step_is_one_run_with_padding() -> None:
    """A block drafter's step is one DRAFT_BLOCK run. Padding requests of a graph have blocks too; other ones none."""
    assert block_run((0, 5, 10), 10, 5) == BatchRun(Mode.DRAFT_BLOCK, 0, 0, 2, (5, 5))
    assert block_run((0, 5, 10, 10, 10), 20, 5) == BatchRun(Mode.DRAFT_BLOCK, 0, 0, 2, (5, 5, 5, 5))
    assert block_run((0, 5, 10, 10), 12, 5) == BatchRun(Mode.DRAFT_BLOCK, 0, 0, 2, (5, 5))
    assert block_run((0, 0, 0), 0, 5) is None


def test_without_drafts_a_chunk_of_one_row_decodes() -> None:
    """Without drafts a prompt chunk of one row is DECODE, and longer chunks are EXTEND."""
    assert [one.mode for one in split([1, 1, 2], verify=1)] == [Mode.DECODE, Mode.EXTEND]


def join(lens: list[int], kv_lens: list[int], ragged: bool = True) -> list[BatchRun]:
    """Split a step of these rows, its runs joined if that is better, for an H200 and 32 query heads over 8 KV heads."""
    shape, device = AttentionShape(32, 8, 128, 16), DeviceProfile("cuda", 90, 132)
    geometry = Geometry.create(shape, Limits(256, 131072), DraftShape(), device, (Mode.EXTEND,))
    one = joined_run((0, *accumulate(lens)), 5, ragged, tuple(kv_lens), geometry)
    return split(lens, ragged=ragged) if one is None else [one]


def test_only_steps_with_an_extend_run_are_joined() -> None:
    """If the split of a random step has an EXTEND run, one such run covers the whole step, else the split stays."""
    chance = random.Random()
    for _ in range(300):
        rows = chance.choices((0, 1, 2, 5, 6, 40), k=chance.randint(1, 6))
        lens, ragged = [*rows, chance.choice((1, 5, 9))], chance.random() < 0.5
        padded, whole = lens + [0] * chance.randint(0, 2), split(lens, ragged=ragged)
        found = join(padded, [100] * len(padded), ragged)
        if whole[-1].mode is Mode.EXTEND:
            assert found == [BatchRun(Mode.EXTEND, 0, 0, len(lens), tuple(lens))]
        else:
            assert found == split(padded, ragged=ragged)


@pytest.mark.parametrize("lens", [[1, 1, 30], [5, 5, 30, 2], [1, 4, 64], [1] * 40 + [2000]])
def test_mixed_step_is_joined_to_one_run(lens: list[int]) -> None:
    """Decodes and verifies join the prompts of their step in one EXTEND run."""
    assert join(lens, [2000] * len(lens)) == [BatchRun(Mode.EXTEND, 0, 0, len(lens), tuple(lens))]


@pytest.mark.parametrize(
    ("decodes", "chunk", "joined"),
    [
        ([8193] * 64, 512, True), ([500] * 79 + [16384], 2000, True), ([32768] * 40, 2000, True),
        ([500] * 79 + [100_000], 2000, False), ([32768] * 16, 2000, False),
    ],
)  # fmt: skip
def test_long_decodes_join_only_where_ctas_stay_balanced(decodes: list[int], chunk: int, joined: bool) -> None:
    """A long decode keeps its own run, which splits its keys, unless the step has enough other keys to read."""
    lens = [1] * len(decodes) + [chunk]
    assert len(join(lens, [*decodes, chunk])) == (1 if joined else 2)


@pytest.mark.parametrize("lens", [[1, 1], [5, 5], [5, 1, 2], [30, 1], []])
def test_one_run_is_never_changed(lens: list[int]) -> None:
    """A step of one run, or of none, keeps its modes."""
    assert join(lens, [100] * len(lens)) == split(lens)
