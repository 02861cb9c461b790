"""Report of a run: one self-contained HTML page with text tables, without network access, scripts, fonts or images."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from html import escape
from pathlib import Path

from ..check import all_checks
from ..profiles import Profile
from .outcome import Outcome, Result
from .verdict import Verdict, Word

ALSO = 40
"""Maximum number of further cases of a check that are named."""
COLUMNS = tuple(outcome.value for outcome in Outcome)
STYLE = """
:root { color-scheme:light dark; }
body { margin:2em auto; max-width:70em; padding:0 1em; font:15px/1.5 system-ui,sans-serif; }
h1 { font-size:1.5em; } h2 { font-size:1.2em; margin-top:2em; } .good { color:#1d7a46; } .bad { color:#b3261e; }
.none { color:#8a5a00; } table { border-collapse:collapse; } td, th { text-align:left; padding:.2em 1em .2em 0; }
td, th { border-bottom:1px solid #8886; vertical-align:top; } td.n, th.n { text-align:right; }
pre, code { font:12.5px/1.5 ui-monospace,monospace; white-space:pre-wrap; overflow-wrap:anywhere; }
details { border-left:3px solid #8886; padding-left:1em; margin:1em 0; } .soft { opacity:.7; }
"""


def write_page(verdict: Verdict, path: Path) -> None:
    """Write the report of one run to `path`."""
    path.write_text(page(verdict), encoding="utf-8")


def page(verdict: Verdict) -> str:
    """Return the whole page as text."""
    title = escape(f"draftmark contract: {verdict.backend}")
    body = "".join((_head(verdict), _profiles(verdict), _open_items(verdict), _checks(verdict)))
    head = f'<head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style></head>'
    return f'<!doctype html>\n<html lang="en">{head}<body><h1>{title}</h1>{body}</body></html>\n'


def _head(verdict: Verdict) -> str:
    """Return the verdict line, the six counts, the commit and digests of the code, and the machines of the runs."""
    kind = {Word.CONFORMS: "good", Word.DOES_NOT: "bad"}.get(verdict.word, "none")
    counts = [[name.replace("_", " "), f"{count:,}"] for name, count in asdict(verdict.counts).items()]
    source = verdict.source
    about = [["commit", f"{source.get('commit') or 'none'} ({source.get('tree', 'unknown')})"]]
    about += [[f"identity: {part}", digest[:16]] for part, digest in verdict.identity.items()]
    about += [["run", _run(run)] for run in verdict.runs]
    return (
        f'<p class="{kind}"><b>{escape(verdict.line)}</b></p>{_table(["items", ""], counts)}{_table(["", ""], about)}'
    )


def _run(run: dict[str, object]) -> str:
    """Return date, machine, device and versions of a run in one line."""
    flat = {key: value for key, value in run.items() if key in ("date", "python", "machine", "items")}
    nested = [value for key in ("device", "versions") if isinstance(value := run.get(key), dict)]
    return ", ".join(f"{key} {value}" for one in (flat, *nested) for key, value in one.items())


def _profiles(verdict: Verdict) -> str:
    rows = [
        [profile.value, "in full" if profile in verdict.profiles else "not in full, or not run"] for profile in Profile
    ]
    return f"<h2>Profiles (by the tiers that ran)</h2>{_table(['profile', 'served'], rows)}"


def _open_items(verdict: Verdict) -> str:
    """Return the first item of each check with another outcome than passed or refused, with its full message."""
    groups: dict[tuple[Outcome, str], list[Result]] = {}
    for result in verdict.results:
        if result.outcome not in (Outcome.PASSED, Outcome.REFUSED):
            groups.setdefault((result.outcome, result.check), []).append(result)
    blocks = [
        _block(results) for results in sorted(groups.values(), key=lambda one: one[0].outcome is not Outcome.FAILED)
    ]
    return f"<h2>Items that did not pass</h2>{''.join(blocks)}" if blocks else ""


def _block(results: list[Result]) -> str:
    first, others = results[0], results[1:]
    also = ", ".join(result.case for result in others[:ALSO])
    also += f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
    shown = " open" if first.outcome is Outcome.FAILED else ""
    return (
        f"<details{shown}><summary><code>{escape(first.item)}</code> · {first.outcome.value} · {len(results)} items"
        f"</summary><pre>{escape(first.message)}</pre>{f'<p>also: {escape(also)}</p>' if also else ''}</details>"
    )


def _checks(verdict: Verdict) -> str:
    ended: dict[str, Counter[str]] = {}
    for result in verdict.results:
        ended.setdefault(result.check, Counter())[result.outcome.value] += 1
    rows = []
    for check in all_checks():
        counts = ended.get(check.name, Counter())
        rule = f"{check.doc} {' '.join(check.bugs)}"
        rows.append([check.name, check.tier.value, rule, *(str(counts[name] or "") for name in COLUMNS)])
    return f"<h2>Checks</h2>{_table(['check', 'tier', 'rule and known bugs', *COLUMNS], rows)}"


def _table(head: list[str], rows: list[list[str]]) -> str:
    """Return an HTML table; columns of numbers are aligned to the right."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def _cell(text: str) -> str:
    number = ' class="n"' if text.replace(",", "").isdigit() else ""
    return f"<td{number}>{escape(text)}</td>"
