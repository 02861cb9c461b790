"""The failures that this project exists for, in the released SGLang that had each, and in one that has it right.

Of the five, sglang#26738 was in no release: what brought it and its fix lie between two. Releases are fetched, once.
"""

from __future__ import annotations

import pytest

from draftmark.errors import DraftmarkError
from draftmark_sglang.judge.releases import prepare
from tools.docs import findings

SEEDS = {"a": "sglang-26753", "c": "sglang-27338", "d": "sglang-26521", "e": "sglang-22778"}


@pytest.mark.parametrize("seed", SEEDS)
def test_a_seed_is_in_the_release_that_had_it(seed: str) -> None:
    """`draftmark judge` finds it there, with the numbers that docs/findings.md gives, and not in the later release."""
    [one] = [one for one in findings.read() if one.id == SEEDS[seed]]
    try:
        for release in (one.release, one.right):
            prepare(release)
    except DraftmarkError as error:
        pytest.skip(str(error))
    there, later = findings.asked(one, one.release), findings.asked(one, one.right)
    assert there["outcome"] == "wrong" and one.got in there["message"], there
    assert later["outcome"] == "right", later
