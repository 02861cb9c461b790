"""Bad arguments of `draftmark size` print one line on stderr, without a traceback, and nothing on stdout."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]

SIZE = {
    "unknown backend": (("atlantis",), 1, "no installed distribution registers it"),
    "topk 0": (("reference", "--topk", 0), 2, "draft.topk is 0"),
    "no draft token": (("reference", "--num-draft-tokens", 0), 2, "draft.num_draft_tokens is 0"),
    "no step": (("reference", "--num-steps", 0), 2, "draft.num_steps is 0"),
    "page size 0": (("reference", "--page-size", 0), 2, "attention.page_size is 0"),
    "heads that do not divide": (("reference", "--num-qo-heads", 7), 2, "a multiple of num_kv_heads = 8"),
    "negative heads": (("reference", "--num-kv-heads", -1), 2, "attention.num_kv_heads is -1"),
    "negative context": (("reference", "--max-context-len", -5), 2, "limits.max_context_len is -5"),
    "negative window": (("reference", "--window-left", -2), 2, "attention.window_left is -2"),
    "no request": (("reference", "--max-num-reqs", 0), 2, "limits.max_num_reqs is 0"),
    "captured 0": (("reference", "--capture-batch-sizes", "0,4"), 2, "limits.capture_batch_sizes is 0"),
    "captured words": (("reference", "--capture-batch-sizes", "a,b"), 2, "is not a list of integers"),
    "NaN cap": (("reference", "--logits-soft-cap", "nan"), 2, "attention.logits_soft_cap is nan"),
    "unknown dtype": (("reference", "--dtype", "int4"), 2, "attention.q_dtype is 'int4'"),
    "misspelt backend": (("refrence",), 1, "did you mean reference?"),
    "no multiprocessor": (("reference", "--num-sms", 0), 2, "device.num_sms is 0"),
    "no device": (("reference", "--device", ""), 2, "--device is ''"),
    "a device that is a number": (("reference", "--device", "3"), 2, "--device is '3'"),
    "negative compute capability": (("reference", "--arch", -1), 2, "--arch is -1"),
    "no KV dtype": (("reference", "--kv-dtype", ""), 2, "attention.kv_dtype is ''"),
    "a hole among captured sizes": (("reference", "--capture-batch-sizes", "1,,2"), 2, "is not a list of integers"),
    "context beyond int32": (("reference", "--max-context-len", 2**31), 2, "must fit int32"),
}


@pytest.mark.parametrize("kind", SIZE)
def test_size_reports_bad_input_on_one_line(draftmark: Run, kind: str) -> None:
    """`size` prints the field, the value and the limit."""
    argv, code, cause = SIZE[kind]
    draftmark("size", *argv).assert_one_line_error(code, cause)


def test_two_distributions_with_one_name(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A name that two distributions register is an error that names both distributions."""
    distribution("twin", project="vendor-a")
    distribution("twin", project="vendor-b")
    draftmark("size", "twin").assert_one_line_error(1, "vendor-a 1.0 and vendor-b 1.0 both register it")
