"""Command lines of the suite's commands that ask for what there is not: one sentence, exit code 2, nothing run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

WRONG = {
    "contract of nobody": (
        "contract",
        (),
        "the following arguments are required: NAME; see `draftmark contract --help`",
    ),
    "contract of two": ("contract", ("reference", "other"), "unrecognized arguments: other; see `draftmark contract"),
    "a tier that there is not": ("contract", ("reference", "--tier", "all"), "invalid choice: 'all'"),
    "fewer than no case": (
        "contract",
        ("reference", "--sample", -1),
        "--sample is -1, but it must be 0 or more; 0 means all",
    ),
    "fewer than no worker": ("contract", ("reference", "--workers", -3), "0 means none"),
    "half a worker": ("contract", ("reference", "--workers", 1.5), "invalid int value: '1.5'"),
    "a seed that is a word": ("contract", ("reference", "--seed", "x"), "argument --seed: invalid int value: 'x'"),
    "no such item": (
        "contract",
        ("reference", "--item", "nothing"),
        "is no item of the suite; -k TEXT selects items by a part",
    ),
    "a device and no device tier": (
        *("contract", ("reference", "--device", "cuda:0")),
        "--device cuda:0 needs --tier device; the host tier runs on the CPU",
    ),
    "a device and sizes alone": (
        *("contract", ("reference", "--tier", "sizing", "--device", "cuda")),
        "the sizing tier runs on the CPU",
    ),
    "a record in a folder that is not there": (
        *("contract", ("reference", "--record", "no/such/folder/x.json")),
        "lies in a folder that does not exist; create the folder first",
    ),
    "proofs of nobody": ("prove", (), "the following arguments are required: NAME; see `draftmark prove --help`"),
    "proofs of two": ("prove", ("reference", "reference"), "unrecognized arguments: reference; see `draftmark prove"),
    "times of nobody": ("bench", (), "the following arguments are required: NAME"),
    "a chunk of nothing": ("bench", ("reference", "--chunk", 0), "argument --chunk: '0' is not an integer of 1"),
    "a page of less than nothing": ("bench", ("reference", "--page-size", -1), "'-1' is not an integer of 1"),
    "a dtype that is not timed": ("bench", ("reference", "--dtype", "int8"), "invalid choice: 'int8'"),
    "heads of three kinds": ("bench", ("reference", "--heads", "4,2,1"), "such as 32,8"),
    "a device with a word for a number": (
        "bench",
        ("reference", "--device", "cuda:x"),
        "torch has no device 'cuda:x'",
    ),
    "an engine without a name": ("judge", (":",), "':' names no engine; there are"),
    "a sample that is a word": ("judge", ("sglang:triton", "--sample", "x"), "invalid int value: 'x'"),
    "two targets": (
        "judge",
        ("sglang:triton", "vllm:CPU_ATTN"),
        "unrecognized arguments: vllm:CPU_ATTN; see `draftmark judge",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_it_is_refused_in_one_sentence(draftmark: Run, kind: str) -> None:
    """What is wrong with it, and where to read on."""
    command, argv, cause = WRONG[kind]
    draftmark(command, *argv).assert_one_line_error(2, cause)


def test_a_device_may_stand_beside_an_item_of_another_tier() -> None:
    """A line that runs a failed item again has the device of the run that it failed in, whatever the item needs."""
    from draftmark_contract.runner.options import RunOptions

    RunOptions("reference", items=("load.answers_repeatably[mandatory]",), device="cuda:0").check()
