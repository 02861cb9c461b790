"""On a GPU: the spinning device tells the mutants of a late one, and the CUDA plugins pass its checks.

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

from .mutants import late, staging
from .mutants.mutant import USUAL, Mutant

pytestmark = [
    pytest.mark.device,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
PLUGINS = ("cuda_triton", "cuda_flashinfer", "cuda_trtllm")
CHECKS = [one for one in all_checks() if one.name.startswith("late.") and one.tier is Tier.DEVICE]
ITEMS = [pytest.param(check, case, id=check.item(case)) for check in CHECKS for case in check.cases()]
HOST_ONLY = {
    "L08": "torch keeps pinned memory for its own copies, and a test has no other library's",
    "L10": "a launch by record_call runs at once here; a host function of a stream would not",
}
"""Mutants whose stand-in for a library is right on a real device."""
TELLING = ("target", "draft")


def ends(backend: LoadedBackend, check: Check, case: Case) -> None:
    """Run one item on the device; a refusal passes."""
    try:
        check.run(BackendUnderTest(backend, "cuda", Tier.DEVICE), case)
    except Refused:
        return


def wrong(backend: LoadedBackend) -> str:
    """The first failing item of a few, or nothing."""
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
def test_fenced_staging_passes_behind_a_spinning_device(layout: str, kind: str) -> None:
    """Events of the GPU keep each round's numbers its own."""
    built = Mutant("none", "", "", staging.HOOKS, patch=staging.staged(staging.RIGHT[kind])).build(layout)
    assert not wrong(built)


@pytest.mark.parametrize("mutant", [pytest.param(one, id=one.id) for one in late.MUTANTS if one.id not in HOST_ONLY])
def test_a_spinning_device_tells_what_a_queue_tells(mutant: Mutant) -> None:
    """The mutants of the host tier fail on the device too, so the device is late indeed."""
    assert wrong(mutant.build(mutant.layouts[0])), f"{mutant.id} survives on the device: {mutant.what}"


@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize(("check", "case"), ITEMS)
def test_plugins_pass(name: str, check: Check, case: Case) -> None:
    """Every item of a late device, for every CUDA plugin that is installed."""
    try:
        backend = load(name)
        backend.require_runtime("cuda")
    except BackendLoadError as error:
        pytest.skip(str(error))
    ends(backend, check, case)
