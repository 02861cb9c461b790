"""Tests of the `late` checks on a GPU delayed by a spin kernel: mutants fail, and installed CUDA plugins pass.

``pytest -m device core/contract/tests/test_late_device.py core/contract/tests/late_device``
"""

from __future__ import annotations

import pytest
import torch

from draftmark.errors import BackendLoadError
from draftmark.loaded import LoadedBackend
from draftmark.registry import load
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Case, Check, Refused, Tier, all_checks

from .mutants import catalog
from .mutants.designs import staging
from .mutants.mutant import USUAL, Mutant

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
PLUGINS = ("cuda_triton", "cuda_flashinfer", "cuda_trtllm")
CHECKS = [one for one in all_checks() if one.name.startswith("late.") and one.tier is Tier.DEVICE]
LATE = [one for one in catalog.MUTANTS if one.id.startswith("L")]
ITEMS = [pytest.param(check, case, id=check.item(case)) for check in CHECKS for case in check.cases()]
HOST_ONLY = {
    "L08": "torch keeps pinned memory for its own copies, and a test has no other library's",
    "L10": "a launch by record_call runs at once here; a host function of a stream would not",
}
"""Mutants with a replacement for a library that is correct on a real device."""
TELLING = ("target", "draft")


def ends(backend: LoadedBackend, check: Check, case: Case) -> None:
    """Run one item on the GPU; a refused item counts as passed."""
    try:
        check.run(BackendUnderTest(backend, "cuda", Tier.DEVICE), case)
    except Refused:
        return


def wrong(backend: LoadedBackend) -> str:
    """Return the first failing item among the `late` cases "target" and "draft", or ""."""
    for check in CHECKS:
        for case in check.cases():
            if case.id in TELLING:
                try:
                    ends(backend, check, case)
                except Exception as error:
                    return f"{check.item(case)}: {error}"
    return ""


@pytest.mark.parametrize("layout", USUAL)
@pytest.mark.parametrize("kind", staging.RIGHT)
def test_fenced_staging_passes_on_a_spinning_device(layout: str, kind: str) -> None:
    """If a backend waits with fences, each batch in flight on the GPU keeps its own data."""
    built = Mutant("none", "", "", staging.HOOKS, patch=staging.staged(staging.RIGHT[kind])).build(layout)
    assert not wrong(built)


@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.id) for one in LATE if one.id not in HOST_ONLY])
def test_late_mutants_fail_on_a_spinning_device(mutant: Mutant) -> None:
    """Mutants that fail the `late` checks on the host tier also fail on the GPU, so the GPU really runs late."""
    assert wrong(mutant.build(mutant.layouts[0])), f"{mutant.id} survives on the device: {mutant.what}"


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize(("check", "case"), ITEMS)
def test_plugins_pass(name: str, check: Check, case: Case) -> None:
    """Every installed CUDA plugin passes all `late` items of the device tier."""
    try:
        backend = load(name)
        backend.require_runtime("cuda")
    except BackendLoadError as error:
        pytest.skip(str(error))
    ends(backend, check, case)
