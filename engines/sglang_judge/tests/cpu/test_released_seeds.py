"""Test that the judge finds known failures in the SGLang releases that had them, and not in fixed releases.

The failures are four of the five that draftmark prevents; sglang#26738 was in no release. Each release is downloaded
once.
"""

from __future__ import annotations

import pytest

from draftmark.errors import DraftmarkError
from draftmark_sglang_judge.releases import prepare
from tools.docs import findings

SEEDS = {"a": "sglang-26753", "c": "sglang-27338", "d": "sglang-26521", "e": "sglang-22778"}


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_is_found_in_its_release(seed: str) -> None:
    """`draftmark judge` finds the failure, with the value in docs/findings.md, only in the release that has it."""
    [one] = [one for one in findings.read() if one.id == SEEDS[seed]]
    try:
        for release in (one.release, one.right):
            prepare(release)
    except DraftmarkError as error:
        pytest.skip(str(error))
    there, later = findings.outcome_of(one, one.release), findings.outcome_of(one, one.right)
    assert there["outcome"] == "failed" and one.got in there["message"], there
    assert later["outcome"] == "passed", later
