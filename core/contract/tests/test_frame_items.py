"""Tests of the list of items: complete, stable, equal for every backend, and importable without torch."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter

from draftmark.version import CONTRACT_MAJOR, CONTRACT_MINOR
from draftmark_contract.check import Tier, all_checks
from draftmark_contract.runner.item import all_items

_LIST = """
import sys
from draftmark_contract.runner.item import all_items
print("\\n".join(item.id for item in all_items()))
assert "torch" not in sys.modules, "a module of checks/ imports torch at its top"
"""


def test_ids_are_unique_slugs() -> None:
    """Item ids are unique and safe in a shell and in TOML, since results, known failures and -k use them."""
    ids = [item.id for item in all_items()]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    bad = [name for name in ids if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+\[[A-Za-z0-9_.+-]+\]", name)]
    assert bad == []


def test_items_are_the_same_in_another_process_without_torch() -> None:
    """Ids and order depend only on the version: a process without torch lists equal items."""
    done = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [item.id for item in all_items()]


def test_every_check_has_a_sentence() -> None:
    """Every check's docstring begins with a sentence, which failures and the report print."""
    assert [check.name for check in all_checks() if not check.doc.endswith(".")] == []


def test_no_item_is_newer_than_the_core() -> None:
    """No item belongs to a contract newer than the core's, since no plugin could target it."""
    assert max(item.since for item in all_items()) <= (CONTRACT_MAJOR, CONTRACT_MINOR)


def test_items_are_ordered_from_simple_to_complex() -> None:
    """Items begin with loading, run one eager forward before many, and end with graphs and the device tier."""
    order = [check.name for check in all_checks()]
    expected = (
        "load.describes_itself",
        "supports.mandatory_profile",
        "sizing.covers",
        "metadata.decodes_to_the_token_history",
    )
    expected += (
        "numerics.match_float64",
        "padding.is_declared",
        "history.equals_a_fresh_state",
        "graphs.replay_equals_eager",
    )
    expected += ("metadata.decodes_to_the_token_history_on_device",)
    places = [order.index(name) for name in expected]
    assert places == sorted(places)
    first = next(item for item in all_items() if item.check.name == "numerics.match_float64")
    assert first.case.id == "mandatory-decode"


def test_tiers_include_those_before() -> None:
    """A tier includes the tiers before it."""
    assert Tier.DEVICE.includes == (Tier.SIZING, Tier.HOST, Tier.DEVICE)
    assert len(all_items(Tier.HOST.includes)) == len(all_items()) - len(all_items((Tier.DEVICE,)))
