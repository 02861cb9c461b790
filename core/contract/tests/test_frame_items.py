"""Tests of the list of items (one check on one case): complete, equal for every backend, and listed without torch."""

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
    """Item ids are unique and safe in a shell and in TOML, because results, known failures and -k use them."""
    ids = [item.id for item in all_items()]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    bad = [name for name in ids if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+\[[A-Za-z0-9_.+-]+\]", name)]
    assert bad == []


def test_items_are_the_same_in_another_process_without_torch() -> None:
    """A process without torch lists the same item ids in the same order."""
    done = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [item.id for item in all_items()]


def test_every_check_has_a_sentence() -> None:
    """Every check's docstring begins with a sentence, because failures and the report print it."""
    assert [check.name for check in all_checks() if not check.doc.endswith(".")] == []


def test_no_item_is_newer_than_the_core() -> None:
    """No item belongs to a contract version newer than the core's, because no plugin could target that version."""
    assert max(item.since for item in all_items()) <= (CONTRACT_MAJOR, CONTRACT_MINOR)


def test_items_are_ordered_from_simple_to_complex() -> None:
    """Items run from simple to complex: loading, one eager forward, many forwards, graphs, the device tier."""
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
    """A tier includes all earlier tiers: sizing, then host, then device."""
    assert Tier.DEVICE.includes == (Tier.SIZING, Tier.HOST, Tier.DEVICE)
    assert len(all_items(Tier.HOST.includes)) == len(all_items()) - len(all_items((Tier.DEVICE,)))
