"""Tests of `draftmark bench`, with tiny sizes on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmark import AttentionShape
from draftmark.batch import Tree
from draftmark_contract.cli import bench, measuring

Run = Callable[..., Any]

SMALL = ("--device", "cpu", "--requests", 2, "--context", 5, "--chunk", 3, "--heads", "2,1", "--head-dim", 16)
SHAPE = AttentionShape(2, 1, 16, 16, "float32", "float32")
CPU = torch.device("cpu")

SPOILT = """
from draftmark import BackendInfo
from draftmark_reference import ReferencePlugin
from draftmark_reference.backend import ReferenceBackend

class Wrong(ReferenceBackend):
    def attend(self, q, cache, batch, out):
        super().attend(q, cache, batch, out)
        {spoil}

class Plugin(ReferencePlugin):
    info = BackendInfo(name={name!r}, device="any", contract_minor=0, host_kernels=True, runtime=())

    def open_backend(self, geometry, arena):
        return Wrong(geometry, arena)
"""


def test_every_case_is_compared_and_timed(draftmark: Run) -> None:
    """All five cases run by default, and the output warns that the times are no measure of speed."""
    done = draftmark("bench", "reference", *SMALL)
    assert done.code == 0, done.err
    for name in bench.CASE_NAMES:
        assert any(line.startswith(f"{name} ") for line in done.out.splitlines()), done.out
    assert "no measure of speed" in done.out


def test_case_names_match_measuring_module() -> None:
    """The command's list of cases, which needs no torch, equals the list of the measuring module."""
    assert tuple(measuring.CASES) == bench.CASE_NAMES
    assert set(measuring.TOLERANCE) == set(bench.DTYPES)


def test_json_rows(draftmark: Run) -> None:
    """JSON output has a row per case and backend in the given order, with the bytes of K and V; a CPU gets no rate."""
    found = draftmark("bench", "reference", *SMALL, "--cases", "verify16,decode", "--json").json
    assert (found["schema"], found["device"]) == (1, "cpu")
    assert [row["case"] for row in found["rows"]] == ["verify16", "decode"]
    verify = found["rows"][0]
    assert verify["bytes"] == 2 * (2 * (5 + 16)) * 16 * 4
    assert (verify["rows"], verify["checked"], verify["max_err"], verify["tb_per_s"]) == (32, True, 0.0, None)
    assert verify["us"] > 0


def test_two_names_share_the_inputs(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A second backend is compared with the same reference output, and a backend named twice is measured once."""
    distribution("twin")
    argv = ("bench", "reference", "twin", "twin", *SMALL, "--cases", "draft8", "--json")
    rows = draftmark(*argv).json["rows"]
    assert [(row["backend"], row["max_err"]) for row in rows] == [("reference", 0.0), ("twin", 0.0)]


def test_a_refusal_is_a_row(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A backend on a machine without its device gets a row with the reason, and the command still succeeds."""
    distribution("metal", device="npu", host_kernels=False)
    done = draftmark("bench", "metal", "reference", *SMALL, "--cases", "decode", "--json")
    assert done.code == 0
    metal, reference = done.json["rows"]
    assert metal["us"] is None and not metal["checked"] and "npu" in metal["note"]
    assert reference["checked"]


@pytest.mark.parametrize(
    ("name", "spoil", "note"),
    [
        ("off", "out[0] += 1", "wrong output, not timed"),
        ("nans", "out[0, 0, 0] = float('nan')", "wrong output, not timed"),
        ("raises", "raise ValueError('no such tile')", "ValueError: no such tile"),
    ],
)
def test_wrong_output_is_not_timed(
    draftmark: Run, distribution: Callable[..., Path], name: str, spoil: str, note: str
) -> None:
    """A backend with a wrong output or an error gets no time, and the command fails; other rows are still timed."""
    distribution(name, source=SPOILT.format(name=name, spoil=spoil))
    done = draftmark("bench", name, "reference", *SMALL, "--cases", "decode", "--json")
    assert done.code == 1
    assert f"1 of 2 rows failed ({name} in decode)" in done.err
    wrong, reference = done.json["rows"]
    assert (wrong["us"], wrong["checked"], wrong["note"]) == (None, False, note)
    assert reference["checked"]


@pytest.mark.parametrize(
    ("argv", "code", "word"),
    [
        (("missing",), 1, "missing"),
        (("reference", "--cases", "gallop"), 2, "gallop is no case"),
        (("reference", "--cases", ","), 2, "choose from"),
        (("reference", "--heads", "8"), 2, "such as 32,8"),
        (("reference", "--requests", "0"), 2, "'0' is not an integer of 1"),
        (("reference", "--context", str(2**31)), 2, "is not an integer of 1"),
        (("reference", "--heads", "3,2"), 2, "must be a multiple of KV heads"),
        (("reference", "--device", "abacus"), 2, "abacus"),
        (("reference", "--device", ""), 2, "torch has no device ''"),
        (("reference", "--device", "meta"), 2, "torch sees no meta device"),
    ],
)
def test_wrong_arguments(draftmark: Run, argv: tuple[str, ...], code: int, word: str) -> None:
    """A wrong argument ends the command with one sentence that names the argument."""
    done = draftmark("bench", *argv)
    assert done.code == code
    assert word in done.err and done.err.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device(draftmark: Run) -> None:
    """`--device cuda` is rejected as a wrong argument on a machine without a CUDA device."""
    done = draftmark("bench", "reference", "--device", "cuda")
    assert (done.code, "no cuda device" in done.err) == (2, True)


def test_draft_trees_extend_the_previous_step() -> None:
    """In case draft8 a row sees itself and one ancestor of the previous step; in verify16 every row sees the root."""
    draft = measuring.Inputs(measuring.case_of("draft8", 3, 4, 0), SHAPE, CPU).batch
    assert isinstance(draft.tail, Tree)
    words = draft.tail.mask[:, 0].view(3, 8)
    own = 1 << (8 + torch.arange(8))
    assert bool(((words & 0xFF00) == own).all())
    first = words & 0xFF
    assert bool(((first > 0) & (first & (first - 1) == 0)).all())
    assert draft.tail.depth.tolist() == [[0] * 8 + [1] * 8] * 3
    verify = measuring.Inputs(measuring.case_of("verify16", 3, 4, 0), SHAPE, CPU).batch
    assert isinstance(verify.tail, Tree)
    assert bool((verify.tail.mask[:, 0] & 1 == 1).all())
    assert verify.tail.depth[:, 0].tolist() == [0, 0, 0]


def test_large_sizes_shrink_to_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, first the number of requests, then the context is halved until KV fits into 1/16 of the free memory."""
    from draftmark_tools.cli.parser import parse

    def sizes(free: int, *argv: str) -> tuple[int, int]:
        monkeypatch.setattr(measuring, "free_bytes", lambda device: free)
        _, args = parse(["bench", "reference", "--cases", "decode", *argv])
        _, cases = bench._sizes(args, torch.device("cuda"))
        return cases[0].requests, cases[0].context

    assert sizes(140 << 30) == (64, 8192)
    assert sizes(8 << 30) == (16, 8192)
    assert sizes(1 << 28) == (1, 4096)
    assert sizes(8 << 30, "--requests", "64") == (64, 2048)
