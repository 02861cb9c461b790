"""Tests of a known bug (sglang#26521, #26655): a captured graph reads KV lengths that are zero or not advanced.

In SGLang the draft step of TRTLLM-MHA was captured with a zero-initialised `cache_seqlens`. Softmax over no keys gave
NaN. Here backends with such defects must fail the contract's checks of capture and replay.
"""

from __future__ import annotations

import pytest

from draftmark.graphs import Program, is_recording
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.geometries import behaviours
from draftmark_contract.check import ContractViolation, Tier
from draftmark_contract.checks.graphs import captured_run_is_right, replay_equals_eager
from draftmark_cuda_trtllm import launch
from draftmark_cuda_trtllm.backend import XqaBackend

CASES = [("draft", Program.DRAFT), ("target", Program.VERIFY), ("target", Program.DECODE)]


class ZeroedAtCapture(XqaBackend):
    """XQA backend with a defect: the captured graph resets `kv_lens` to zero."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        if is_recording():
            self.arena["kv_lens"].zero_()


class SkippedAtCapture(XqaBackend):
    """XQA backend with a defect: it writes metadata in the warm-up, but the graph does not contain the write."""

    def write_metadata(self, batch):
        if not is_recording():
            super().write_metadata(batch)


class TailForgotten(XqaBackend):
    """XQA backend with a defect: KV lengths count committed tokens only, so rows miss the new tokens' keys."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        self.arena["kv_lens"][: batch.padded_reqs].copy_(batch.prefix_lens)


class FirstStepForever(XqaBackend):
    """XQA backend with a defect: in every draft step, KV lengths count the first step's draft tokens only."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        self.arena["kv_lens"][: batch.padded_reqs].copy_(batch.prefix_lens + batch.q_lens[0])


class FrozenLengths(XqaBackend):
    """XQA backend with a defect: the graph reads the KV lengths of the warm-up."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        lens = self.arena["kv_lens"]
        if is_recording():
            lens.copy_(self.kept)
        else:
            self.kept = lens.clone()


def run(loaded, geometry_name, program):
    subject = BackendUnderTest(loaded, "cpu", Tier.HOST)
    value = (behaviours()[geometry_name], program)
    captured_run_is_right(subject, value)
    replay_equals_eager(subject, value)


@pytest.mark.parametrize(("name", "program"), CASES)
def test_captured_run_and_replays_are_right(loaded_with, name, program):
    """The unchanged XQA backend passes the contract's checks of capture and replay."""
    run(loaded_with(XqaBackend), name, program)


@pytest.mark.parametrize("backend", [ZeroedAtCapture, SkippedAtCapture, TailForgotten, FrozenLengths])
@pytest.mark.parametrize(("name", "program"), CASES)
def test_capture_with_wrong_lengths_fails(loaded_with, backend, name, program):
    """The contract's checks of capture and replay fail for each backend with wrong KV lengths."""
    with pytest.raises(ContractViolation):
        run(loaded_with(backend), name, program)


def test_draft_steps_that_do_not_advance_fail(loaded_with):
    """If later draft steps have the first step's KV lengths, a check fails, and its error names kv_lens."""
    with pytest.raises(ContractViolation, match="kv_lens"):
        run(loaded_with(FirstStepForever), "draft", Program.DRAFT)


def test_captured_launch_gets_no_length_as_integer():
    """No integer argument of the captured metadata launch is a KV length, because a graph would freeze it."""
    import inspect

    parameters = inspect.signature(launch.write_uniform).parameters
    assert [name for name, one in parameters.items() if one.annotation in ("int", "tuple[int, int, int]")] == [
        "page_size", "extent", "words",
    ]  # fmt: skip
