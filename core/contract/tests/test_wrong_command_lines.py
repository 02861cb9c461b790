"""Tests of invalid command lines of the contract's commands: exit code 2, one sentence, and nothing runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]

WRONG = {
    "contract without a name": (
        "contract",
        (),
        "the following arguments are required: NAME; see `draftmark contract --help`",
    ),
    "contract with two names": (
        *("contract", ("reference", "other")),
        "unrecognized arguments: other; see `draftmark contract",
    ),
    "unknown tier": ("contract", ("reference", "--tier", "all"), "invalid choice: 'all'"),
    "negative sample": (
        "contract",
        ("reference", "--sample", -1),
        "--sample is -1, but it must be 0 or more; 0 means all",
    ),
    "negative workers": ("contract", ("reference", "--workers", -3), "it must be 1 or more"),
    "fractional workers": ("contract", ("reference", "--workers", 1.5), "invalid int value: '1.5'"),
    "seed is no number": ("contract", ("reference", "--seed", "x"), "argument --seed: invalid int value: 'x'"),
    "item of state": (
        "contract",
        ("cuda_flashinfer", "--item", "state.verify_leaves_the_slot[gdn-chain]"),
        "is for layers with recurrent state, but cuda_flashinfer lists none in BackendInfo.recurrences; choose another",
    ),
    "unknown item": (
        "contract",
        ("reference", "--item", "nothing"),
        "is no item here; -k TEXT selects items by a part",
    ),
    "device without device tier": (
        *("contract", ("reference", "--device", "cuda:0")),
        "--device cuda:0 needs --tier device; the host tier runs on the CPU",
    ),
    "device with sizing tier": (
        *("contract", ("reference", "--tier", "sizing", "--device", "cuda")),
        "the sizing tier runs on the CPU",
    ),
    "record in a missing folder": (
        *("contract", ("reference", "--record", "no/such/folder/x.json")),
        "lies in a folder that does not exist; create the folder first",
    ),
    "prove without a name": ("prove", (), "the following arguments are required: NAME; see `draftmark prove --help`"),
    "prove two names": ("prove", ("reference", "reference"), "unrecognized arguments: reference; see `draftmark prove"),
    "bench without a name": ("bench", (), "the following arguments are required: NAME"),
    "chunk of 0": ("bench", ("reference", "--chunk", 0), "argument --chunk: '0' is not an integer of 1"),
    "negative page size": ("bench", ("reference", "--page-size", -1), "'-1' is not an integer of 1"),
    "unsupported dtype": ("bench", ("reference", "--dtype", "int8"), "invalid choice: 'int8'"),
    "three numbers of heads": ("bench", ("reference", "--heads", "4,2,1"), "such as 32,8"),
    "device index is no number": (
        "bench",
        ("reference", "--device", "cuda:x"),
        "torch has no device 'cuda:x'",
    ),
    "empty engine name": ("judge", (":",), "':' names no engine; there are"),
    "judge sample is no number": ("judge", ("sglang:triton", "--sample", "x"), "invalid int value: 'x'"),
    "two targets": (
        "judge",
        ("sglang:triton", "vllm:CPU_ATTN"),
        "unrecognized arguments: vllm:CPU_ATTN; see `draftmark judge",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_command_line_exits_with_2(draftmark: Run, kind: str) -> None:
    """An invalid command line prints one sentence with the cause, and the command that shows help."""
    command, argv, cause = WRONG[kind]
    draftmark(command, *argv).assert_one_line_error(2, cause)


@pytest.mark.long
def test_device_is_allowed_with_item_of_any_tier(draftmark: Run) -> None:
    """--device is allowed together with --item, because the command printed for a failed item has both."""
    done = draftmark("contract", "reference", "--device", "cuda:0", "--item", "load.describes_itself[plugin]")
    assert done.code == 2 and "1 passed, " in done.out
