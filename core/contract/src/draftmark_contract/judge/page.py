"""Builds the HTML page of one target's verdict: what to fix first, a map of the rules, and folded reasons."""

from __future__ import annotations

from collections import Counter

from ..check import all_checks
from ..page.document import banner, colour_map, definitions, document, folded, map_cell, section, table, tiles
from ..page.failures import Failures, what_to_fix
from .item import Outcome, Result
from .rules import name_of, rules
from .verdict import Verdict, reasons_of

COLOURS = {Outcome.WRONG: "bad", Outcome.NOT_ASKED: "none", Outcome.NOT_SERVED: "cool", Outcome.RIGHT: "good"}
"""Colour of each outcome, the most serious first. A cell has the colour of its most serious outcome."""
MEANINGS = {
    Outcome.NOT_SERVED: "not served: the engine's own capability checks reject the input",
    Outcome.NOT_ASKED: "not asked: this engine, release or device lacks something that the item needs",
}


def page(verdict: Verdict) -> str:
    """Return the whole page as text."""
    sections = (
        _head(verdict),
        section("What to fix first", _failures(verdict)),
        section("Rules", _map(verdict)),
        section("Items that were not judged", _others(verdict)),
        section("Rules without an item", _left_out(verdict)),
    )
    return document(f"draftmark judge: {verdict.target}", "".join(sections))


def _head(verdict: Verdict) -> str:
    """Return the head of the page: the verdict in a sentence, the facts of the target, and the counts of outcomes."""
    if verdict.error:
        return banner("warn", f"{verdict.target} could not be judged", verdict.error)
    right, wrong = verdict.count(Outcome.RIGHT), verdict.count(Outcome.WRONG)
    not_run = verdict.items - len(verdict.results)
    whole = verdict.selected or not not_run
    kind = "bad" if wrong else "warn" if not right or not whole else "cool" if verdict.selected else "good"
    more = "Only some items were selected, so this is no verdict on the whole backend." if verdict.selected else ""
    counts = [(outcome.value, verdict.count(outcome), COLOURS[outcome]) for outcome in Outcome]
    return (
        banner(kind, f"{verdict.target}: {right + wrong:,} items run, {right:,} right, {wrong:,} wrong", more)
        + tiles([*counts, ("not run", not_run, "none")])
        + definitions(verdict.facts.items())
    )


def _failures(verdict: Verdict) -> str:
    """Return the wrong items grouped by rule. Rules that a backend's author meets first come first."""
    order = list(dict.fromkeys(name_of(check) for check in all_checks()))
    ran = Counter(one.rule for one in verdict.results if one.outcome in (Outcome.RIGHT, Outcome.WRONG))
    groups: dict[str, list[Result]] = {}
    for result in verdict.results:
        if result.outcome is Outcome.WRONG:
            groups.setdefault(result.rule, []).append(result)
    ordered = sorted(groups, key=lambda name: order.index(name) if name in order else len(order))
    known = rules()
    return what_to_fix(
        [
            Failures(
                name=name,
                rule=known[name].text if name in known else "",
                message=groups[name][0].message,
                drawing=groups[name][0].drawing,
                cases=[one.case for one in groups[name]],
                ran=ran[name],
            )
            for name in ordered
        ]
    )


def _map(verdict: Verdict) -> str:
    counts: dict[str, Counter[Outcome]] = {}
    for result in verdict.results:
        counts.setdefault(result.rule, Counter())[result.outcome] += 1
    known = rules()
    rows = []
    for name in sorted(counts, key=lambda one: known[one].number if one in known else 0):
        note = f"rule {known[name].number}: {known[name].text}" if name in known else "no rule of the contract"
        cell = map_cell([(outcome.value, counts[name][outcome], colour) for outcome, colour in COLOURS.items()])
        rows.append((name, note, [cell]))
    return colour_map(["rule", "items"], rows) if rows else ""


def _others(verdict: Verdict) -> str:
    """Return two folded sections: reasons of inputs that the backend does not serve, and of items that cannot run."""
    found = []
    for outcome, meaning in MEANINGS.items():
        if count := verdict.count(outcome):
            rows = [[f"{number:,}", reason] for reason, number in reasons_of(verdict.results, outcome)]
            counted = f"{count:,} {'item' if count == 1 else 'items'}"
            found.append(folded(meaning, table(["items", "reason"], rows), strong=counted))
    return "".join(found)


def _left_out(verdict: Verdict) -> str:
    """Return a folded section with the rules of the contract that have no item for this target, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in verdict.left_out.items():
        by_reason.setdefault(reason, []).append(name)
    ordered = sorted(by_reason.items(), key=lambda one: -len(one[1]))
    rows = [[f"{len(names):,}", reason, ", ".join(names)] for reason, names in ordered]
    title = "of the contract, with the reason why this engine has no item for them"
    return (
        folded(title, table(["rules", "reason", "names"], rows), strong=f"{len(verdict.left_out):,} rules")
        if rows
        else ""
    )
