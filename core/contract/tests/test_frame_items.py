"""The list of items: complete, stable, the same for everybody, and importable without torch."""

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
    """Results, known failures and -k go by the id: no two alike, nothing that a shell or TOML would mangle."""
    ids = [item.id for item in all_items()]
    assert [name for name, count in Counter(ids).items() if count > 1] == []
    bad = [name for name in ids if not re.fullmatch(r"[a-z_]+\.[a-z0-9_]+\[[A-Za-z0-9_.+-]+\]", name)]
    assert bad == []


def test_items_are_the_same_in_another_process_without_torch() -> None:
    """The denominator is a constant: the order and the ids depend on nothing but the version."""
    done = subprocess.run([sys.executable, "-c", _LIST], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [item.id for item in all_items()]


def test_every_check_says_what_it_rules() -> None:
    """The docstring's first line is printed with a failure and in the report."""
    assert [check.name for check in all_checks() if not check.doc.endswith(".")] == []


def test_no_item_is_newer_than_the_core() -> None:
    """A check or case of a new minor comes with that minor; else nobody could target it."""
    assert max(item.since for item in all_items()) <= (CONTRACT_MAJOR, CONTRACT_MINOR)


def test_items_come_in_the_order_of_learning() -> None:
    """Tier by tier: loading first, one eager forward before many, graphs and late devices last."""
    order = [check.name for check in all_checks()]
    told = (
        "load.describes_itself",
        "supports.mandatory_profile",
        "sizing.covers",
        "metadata.decodes_to_the_token_history",
    )
    told += (
        "numerics.match_float64",
        "padding.is_declared",
        "history.equals_a_fresh_state",
        "graphs.replay_equals_eager",
    )
    told += ("metadata.decodes_to_the_token_history_on_device",)
    places = [order.index(name) for name in told]
    assert places == sorted(places)
    first = next(item for item in all_items() if item.check.name == "numerics.match_float64")
    assert first.case.id == "mandatory-decode"


def test_tiers_include_those_before() -> None:
    """A run of a tier is a run of the tiers before it too."""
    assert Tier.DEVICE.includes == (Tier.SIZING, Tier.HOST, Tier.DEVICE)
    assert len(all_items(Tier.HOST.includes)) == len(all_items()) - len(all_items((Tier.DEVICE,)))
