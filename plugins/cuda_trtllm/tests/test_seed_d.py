"""Seed (d), sglang#26521 and #26655, in the backend it came from: capture binds zeroed or unadvanced lengths.

There the draft step of TRTLLM-MHA was captured with a zero-initialised `cache_seqlens` that nobody had filled: softmax
over nothing, NaN. The contract's check of the captured run meets our plugin, and must be red for each way to do it.
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
    """The captured region leaves `kv_lens` as it was allocated: zero."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        if is_recording():
            self.arena["kv_lens"].zero_()


class SkippedAtCapture(XqaBackend):
    """Metadata are written by the warm-up, not by the captured region."""

    def write_metadata(self, batch):
        if not is_recording():
            super().write_metadata(batch)


class TailForgotten(XqaBackend):
    """Lengths are the committed ones: not advanced by the tail."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        self.arena["kv_lens"][: batch.padded_reqs].copy_(batch.prefix_lens)


class FirstStepForever(XqaBackend):
    """Every draft step counts the tail of the first one."""

    def write_metadata(self, batch):
        super().write_metadata(batch)
        self.arena["kv_lens"][: batch.padded_reqs].copy_(batch.prefix_lens + batch.q_lens[0])


class FrozenLengths(XqaBackend):
    """Replay reads the lengths of the warm-up."""

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
def test_the_captured_run_and_its_replays_are_right(loaded_with, name, program):
    """Warm-up, capture, first replay with nothing written between, and replays of every size."""
    run(loaded_with(XqaBackend), name, program)


@pytest.mark.parametrize("backend", [ZeroedAtCapture, SkippedAtCapture, TailForgotten, FrozenLengths])
@pytest.mark.parametrize(("name", "program"), CASES)
def test_a_capture_with_other_lengths_fails_loudly(loaded_with, backend, name, program):
    """Zero, skip, forget the tail or freeze, and the same check names the length that is wrong."""
    with pytest.raises(ContractViolation):
        run(loaded_with(backend), name, program)


def test_steps_that_do_not_advance_fail_loudly(loaded_with):
    """The lengths of a later draft step are its own."""
    with pytest.raises(ContractViolation, match="kv_lens"):
        run(loaded_with(FirstStepForever), "draft", Program.DRAFT)


def test_the_launch_takes_every_tensor_that_it_reads():
    """No length reaches the captured launch as a Python number: its integers are extents alone."""
    import inspect

    parameters = inspect.signature(launch.write_uniform).parameters
    assert [name for name, one in parameters.items() if one.annotation in ("int", "tuple[int, int, int]")] == [
        "page_size", "extent", "words",
    ]  # fmt: skip
