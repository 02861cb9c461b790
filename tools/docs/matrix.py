"""Writer of the compatibility table, made from recorded verdicts: served, not served, refused, failed, not run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftmark_contract.profiles import Profile

from .kills import ROOT

RECORDS = ROOT / "benchmarks" / "results"
PLUGINS = tuple(path.parent.name for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))
NEVER: dict[str, Any] = {
    "contract": "–",
    "verdict": "not run",
    "profiles": [],
    "checks": {},
    "tiers_run": [],
    "runs": [],
}
HEAD = """# Compatibility

Generated from the verdicts in this repository (`benchmarks/results/contract-*.json`); do not edit.
[The contract](contract.md#the-verdict) explains the words. A verdict belongs to the code of its commit and to the
contract of that commit. `make release-check` compares that code with today's, and
[what was run](what-was-run.md#verdicts) lists later runs. `ascend_npu` has no run on hardware, only runs on an
[emulated device](../plugins/ascend_npu/emulator/README.md), which are not verdicts.
"""
WORDS = """
* **served**: every item of the profile that ran has passed;
* **not served**: `supports()` refuses part of it, or an item of it failed, is declared, or could not be judged;
* **not run**: the tier, or the newer contract, was never run on this backend, so the result is unknown.
"""
CHECK_OF = {
    Profile.RAGGED_VERIFY: "engine.rows_are_the_devices",
    Profile.DRAFT_BLOCKS: "engine.blocks_see_themselves",
    Profile.ENGINE_FORMS: "engine.forms_are_taken_as_they_are",
}
"""Check of each profile that a later minor added: a record without the check did not test the profile."""
ORDER = ("failed", "declared", "unjudged", "refused", "passed", "not run")


def page(folder: Path = RECORDS, plugins: Iterable[str] = PLUGINS) -> str:
    """Return the whole page as Markdown. A plugin without a record has a column of `not run`."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("contract-*.json"))]
    known = {record["backend"] for record in records}
    records += [{**NEVER, "backend": one} for one in plugins if one not in known]
    names = [f"`{record['backend']}`" for record in records]
    head = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(records)}"]
    lines = [HEAD, "## Where", "", *head]
    lines += [_line("contract", [record["contract"] for record in records])]
    lines += [_line("verdict", [record["verdict"] for record in records])]
    lines += [_line("device", [_device(record) for record in records])]
    lines += [
        _line("day", [_day(record) for record in records]),
        _line("commit", [_commit(record) for record in records]),
    ]
    lines += ["", "## Profiles", WORDS, *head]
    lines += [_line(one, [_profile(one, record) for record in records]) for one in Profile]
    lines += ["", "## Rules", "", "Items of each group of rules, on the host and on the device.", "", *head]
    for module in dict.fromkeys(name.partition(".")[0] for record in records for name in record["checks"]):
        lines.append(_line(module.replace("_", " "), [group(module, record) for record in records]))
    return "\n".join(lines) + "\n"


def group(module: str, record: dict[str, Any]) -> str:
    """Return the number of items per outcome for one group of rules, worst first, or `not run` if there are none."""
    found: Counter[str] = Counter()
    for name, outcomes in record["checks"].items():
        if name.partition(".")[0] == module:
            found.update({outcome.replace("_", " "): count for outcome, count in outcomes.items()})
    cells = [f"**{found[one]:,} {one}**" if one == "failed" else f"{found[one]:,} {one}" for one in ORDER if found[one]]
    return ", ".join(cells) or "not run"


def _profile(profile: Profile, record: dict[str, Any]) -> str:
    if profile in record["profiles"]:
        return "**served**"
    return "not run" if CHECK_OF.get(profile, "load.describes_itself") not in record["checks"] else "not served"


def _device(record: dict[str, Any]) -> str:
    if "device" not in record["tiers_run"]:
        return "not run"
    return next((run["device"]["name"] for run in record["runs"] if run.get("device")), "not recorded")


def _day(record: dict[str, Any]) -> str:
    days = sorted({run["date"] for run in record["runs"] if run.get("date")})
    return days[-1] if days else "not recorded" if record["runs"] else "not run"


def _commit(record: dict[str, Any]) -> str:
    return str(record["source"]["commit"])[:8] if "source" in record else "not run"


def _line(name: str, cells: list[str]) -> str:
    return f"| {name} | {' | '.join(cells)} |"
