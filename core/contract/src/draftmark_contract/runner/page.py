"""Builds the HTML page of a run: verdict, what to fix first, and a map of profiles and tiers, or of rules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from html import escape

from draftmark.version import CONTRACT_MAJOR

from ..check import Tier, all_checks
from ..judge.rules import rules
from ..page.document import banner, colour_map, definitions, document, folded, map_cell, section, table, tiles
from ..page.failures import Failures, what_to_fix
from ..profiles import Profile
from .outcome import Outcome, Result
from .subject import Kind, Listed
from .verdict import Verdict, Word

NOT_RUN = "not run"
COLOURS = {
    Outcome.FAILED.value: "bad",
    Outcome.UPCOMING.value: "warn",
    Outcome.DECLARED.value: "warn",
    Outcome.UNJUDGED.value: "warn",
    NOT_RUN: "none",
    Outcome.REFUSED.value: "cool",
    Outcome.PASSED.value: "good",
}
"""Colour of each count, the most serious first. A cell has the colour of its most serious count."""
SHORT_OF_RIGHT = {
    Outcome.REFUSED: "refused: the backend rejects the input with these reasons",
    Outcome.DECLARED: "declared: fail as the plugin's contract.toml states",
    Outcome.UNJUDGED: "unjudged: nothing wrong was found, but a part was not checked or could not run",
    Outcome.UPCOMING: "upcoming: fail, but are newer than the contract that the plugin targets",
}


def page(verdict: Verdict) -> str:
    """Return the whole page as text."""
    layer = verdict.kind is Kind.LAYER
    sections = (
        _head(verdict),
        section("What to fix first", _failures(verdict)),
        section("Rules", _rules(verdict)) if layer else section("Profiles and tiers", _map(verdict)),
        section("Items that neither passed nor failed", _others(verdict.results)),
        section("Details", _left_out(verdict) + _checks(verdict) + _about(verdict)),
    )
    return document(f"draftmark {'judge' if layer else 'contract'}: {verdict.backend}", "".join(sections))


def _head(verdict: Verdict) -> str:
    """Return the head of the page: the verdict, the line that the terminal prints, the facts, and the counts."""
    kind = {Word.CONFORMS: "good", Word.DOES_NOT: "bad", Word.WITH_KNOWN: "warn"}.get(verdict.word, "cool")
    counts = [
        (name.replace("_", " "), count, COLOURS[name.replace("_", " ")])
        for name, count in asdict(verdict.counts).items()
    ]
    head = banner(kind, f"{verdict.backend} {verdict.word.value}", verdict.line)
    return head + tiles(counts) + definitions(verdict.facts.items())


def _failures(verdict: Verdict) -> str:
    """Return failed items by check in the suite's order, from sizing to graphs. Newer items come last."""
    docs = {check.name: check.doc for check in all_checks()}
    order = list(docs)
    ran = Counter(result.check for result in verdict.results)
    groups: dict[tuple[bool, str], list[Result]] = {}
    for result in verdict.results:
        if result.outcome in (Outcome.FAILED, Outcome.UPCOMING):
            groups.setdefault((result.outcome is Outcome.UPCOMING, result.check), []).append(result)
    known = [key for key in groups if key[1] in docs]
    known.sort(key=lambda key: (key[0], order.index(key[1])))
    ordered = [groups[key] for key in (*known, *(key for key in groups if key[1] not in docs))]
    found = [
        Failures(
            one[0].check,
            docs.get(one[0].check, ""),
            one[0].message,
            one[0].drawing,
            [result.case for result in one],
            ran[one[0].check],
        )
        for one in ordered
    ]
    if verdict.error and not found:
        return f"<p>No item ran: {escape(verdict.error)}.</p>"
    return what_to_fix(found)


def _map(verdict: Verdict) -> str:
    """Return a table of outcomes by profile and tier. An item counts in every profile that it needs."""
    ended = {result.item: result.outcome.value for result in verdict.results}
    counts: dict[tuple[Profile, str], Counter[str]] = {}
    for item in verdict.listed:
        outcome = ended.get(item.id, NOT_RUN)
        if outcome != NOT_RUN or item.since <= (CONTRACT_MAJOR, verdict.minor):
            for profile in _profiles_of(item):
                counts.setdefault((profile, item.tier.value), Counter())[outcome] += 1
    tiers = [tier.value for tier in Tier]
    rows = [
        (profile.value, _served(verdict, profile), [_cell(counts.get((profile, tier), Counter())) for tier in tiers])
        for profile in Profile
    ]
    note = (
        '<p class="soft">Each cell counts the items that need the profile in this tier; an item may need several '
        "profiles. The colour shows the most serious outcome.</p>"
    )
    return note + colour_map(["profile", *(f"{tier} tier" for tier in tiers)], rows)


def _rules(verdict: Verdict) -> str:
    """Return a table of outcomes by rule."""
    counts: dict[str, Counter[str]] = {}
    for result in verdict.results:
        counts.setdefault(result.rule, Counter())[result.outcome.value] += 1
    known = rules()
    rows = []
    for name in sorted(counts, key=lambda one: known[one].number if one in known else 0):
        note = f"rule {known[name].number}: {known[name].text}" if name in known else "no rule of the contract"
        rows.append((name, note, [_cell(counts[name])]))
    return colour_map(["rule", "items"], rows) if rows else ""


def _left_out(verdict: Verdict) -> str:
    """Return a folded section with the rules that have no item for this layer, grouped by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in verdict.rules_left_out.items():
        by_reason.setdefault(reason, []).append(name)
    ordered = sorted(by_reason.items(), key=lambda one: -len(one[1]))
    rows = [[f"{len(names):,}", reason, ", ".join(names)] for reason, names in ordered]
    title = "of the contract, with the reason why this engine has no item for them"
    strong = f"{len(verdict.rules_left_out):,} rules"
    return folded(title, table(["rules", "reason", "names"], rows), strong=strong) if rows else ""


def _profiles_of(item: Listed) -> Sequence[Profile]:
    return sorted(item.needs) or [Profile.CORE]


def _served(verdict: Verdict, profile: Profile) -> str:
    """Return whether a profile is served. It is "in full" only if every item that needs it ran, in every tier."""
    tried, of = verdict.tried.get(profile, (0, 0))
    ran = f"{tried:,} of {of:,} items tried"
    if not verdict.complete:
        return ran
    if profile not in verdict.profiles:
        return f"not served in full, {ran}"
    return "served in full" if tried == of else f"served so far, {ran}"


def _cell(counts: Counter[str]) -> str:
    return map_cell([(name, counts[name], colour) for name, colour in COLOURS.items()])


def _others(results: Iterable[Result]) -> str:
    """Return folded sections: reasons of refused, declared, unjudged and upcoming items, with their checks."""
    found = []
    for outcome, meaning in SHORT_OF_RIGHT.items():
        mine = [result for result in results if result.outcome is outcome]
        reasons: dict[str, Counter[str]] = {}
        for result in mine:
            reasons.setdefault(result.message.partition("\n")[0], Counter())[result.check] += 1
        ordered = sorted(reasons.items(), key=lambda one: -one[1].total())
        rows = [[f"{checks.total():,}", reason, _listed(checks)] for reason, checks in ordered]
        if rows:
            counted = f"{len(mine):,} {'item' if len(mine) == 1 else 'items'}"
            found.append(folded(meaning, table(["items", "reason", "checks"], rows), strong=counted))
    return "".join(found)


def _listed(checks: Counter[str]) -> str:
    return ", ".join(f"{name} ({count:,})" for name, count in checks.most_common())


def _checks(verdict: Verdict) -> str:
    """Return a folded table of all checks with the number of items by outcome."""
    ended: dict[str, Counter[str]] = {}
    for result in verdict.results:
        ended.setdefault(result.check, Counter())[result.outcome.value] += 1
    rows = []
    for check in all_checks():
        counts = ended.get(check.name, Counter())
        items = ", ".join(f"{counts[name]:,} {name}" for name in COLOURS if counts[name]) or NOT_RUN
        rows.append([check.name, check.tier.value, items, f"{check.doc} {' '.join(check.bugs)}"])
    head = ["check", "tier", "items", "rule and known bugs"]
    return folded("every check: its items, its rule, and known bugs of its class", table(head, rows))


def _about(verdict: Verdict) -> str:
    """Return a folded section: commit and digests of the tested code, and the machine of each run."""
    source = verdict.source
    about = [["commit", f"{source.get('commit') or 'none'} ({source.get('tree', 'unknown')})"]]
    about += [[f"identity: {part}", digest[:16]] for part, digest in verdict.identity.items()]
    about += [["run", _run(run)] for run in verdict.runs]
    return folded("what was judged, where and when", table(["", ""], about))


def _run(run: dict[str, object]) -> str:
    """Return date, machine, device and versions of a run in one line."""
    flat = {key: value for key, value in run.items() if key in ("date", "python", "machine", "items")}
    nested = [value for key in ("device", "versions") if isinstance(value := run.get(key), dict)]
    return ", ".join(f"{key} {value}" for one in (flat, *nested) for key, value in one.items())
