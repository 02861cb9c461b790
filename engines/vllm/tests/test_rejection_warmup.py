"""Tests of the warm-up of vLLM's rejection kernel, and of the arguments that it passes in each release."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample import rejection_sampler

from draftmark_vllm import rejection_warmup
from draftmark_vllm.rejection_warmup import verify_greedily, warm_up_rejection
from draftmark_vllm.versions import VLLM
from engines.common.tests.released import Read, Releases, arguments, defined

OWN = "_rejection_greedy_sample"
"""Function that a release has if its own warm-up compiles the kernel."""


@pytest.fixture
def verified() -> Iterator[list[tuple[int, bool]]]:
    """Replace the verification, and return the list of its calls."""
    calls: list[tuple[int, bool]] = []
    rejection_warmup._warm_up.cache_clear()
    with patch.object(
        rejection_warmup, "verify_greedily", lambda drafts, synthetic, _: calls.append((drafts, synthetic))
    ):
        yield calls
    rejection_warmup._warm_up.cache_clear()


def config(drafts: int | None = 4, method: str = "standard", v2: bool = False) -> SimpleNamespace:
    """Return the fields of a `VllmConfig` that the warm-up reads."""
    draft = None if drafts is None else SimpleNamespace(num_speculative_tokens=drafts, rejection_sample_method=method)
    return SimpleNamespace(speculative_config=draft, use_v2_model_runner=v2)


@pytest.mark.parametrize("synthetic", [False, True])
def test_the_kernel_of_greedy_requests_runs(synthetic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own function runs the kernel with the dtypes of a step and without a tensor of greedy requests."""
    launches: list[list[Any]] = []
    monkeypatch.setattr(rejection_sampler, OWN, lambda *given, **_: launches.append([*given]))
    verify_greedily(3, synthetic, torch.device("cpu"))
    (found,) = launches
    out, starts, drafts, best, bonus, is_greedy, most, uniform, rates = found
    assert [one.dtype for one in (out, starts, drafts, best, bonus)] == [
        torch.int32, torch.int32, torch.int32, torch.int64, torch.int32,
    ]  # fmt: skip
    assert is_greedy is None and most == 3 and [uniform is None, rates is None] == [not synthetic] * 2


def test_one_builder_of_a_worker_verifies(verified: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is compiled once for each number of drafts and sampler."""
    monkeypatch.delattr(rejection_sampler, OWN, raising=False)
    for method in ("standard", "synthetic", "standard"):
        warm_up_rejection(config(method=method), torch.device("cuda:0"))
    assert verified == [(4, False), (4, True)]


@pytest.mark.parametrize(
    ("given", "device"), [(config(), "cpu"), (config(drafts=None), "cuda"), (config(v2=True), "cuda")]
)
def test_nothing_is_verified(verified: list[tuple[int, bool]], given: SimpleNamespace, device: str) -> None:
    """A CPU, an engine without drafts and runner V2 need no warm-up."""
    warm_up_rejection(given, torch.device(device))
    assert not verified


def test_a_release_with_its_own_warm_up(verified: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is verified in a release that registers the kernel for its own warm-up."""
    monkeypatch.setattr(rejection_sampler, OWN, None, raising=False)
    warm_up_rejection(config(), torch.device("cuda"))
    assert not verified


@Releases(VLLM, "vllm", "DRAFTMARK_VLLM_WHEELS").each()
def test_each_release_takes_the_arguments(read: Read) -> None:
    """vLLM's function has every argument that the warm-up passes by name."""
    source = Path(rejection_warmup.__file__).read_text()
    (call,) = (
        one
        for one in ast.walk(defined(source, "verify_greedily"))
        if isinstance(one, ast.Call) and ast.unparse(one.func) == "rejection_sample"
    )
    theirs = arguments(defined(read("v1/sample/rejection_sampler.py"), "rejection_sample"))
    assert {one.arg for one in call.keywords} <= set(theirs)
