"""Write the page: verdict, checks, buffers with bars, the tree and page table drawn, failures with their batch."""

from __future__ import annotations

from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from draftmark.errors import DraftmarkError
from draftmark.registry import load

from ...backend_under_test import BackendUnderTest
from ...check import ContractViolation, Tier, all_checks
from ...sizing.batches import brief
from ..item import Outcome, Result
from . import drawings
from .sample import PREFIXES, BufferRow, buffer_rows, sample_geometry
from .style import STYLE

if TYPE_CHECKING:
    from ..verdict import Verdict

ALSO = 40
"""Further failing cases of a check that are named."""


def write_page(verdict: Verdict, path: Path, subject: BackendUnderTest | None = None) -> None:
    """Write the report of one run to `path`.

    Args:
        subject: the backend whose buffers are drawn; loaded by the verdict's name when not given.
    """
    path.write_text(page(verdict, subject), encoding="utf-8")


def page(verdict: Verdict, subject: BackendUnderTest | None = None) -> str:
    """The whole page as text."""
    parts = [_head(verdict), _failures(verdict), _buffers(verdict, subject), _batch(), _checks(verdict)]
    title = escape(f"draftmark contract: {verdict.backend}")
    meta = '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    head = f"<head>{meta}<title>{title}</title><style>{STYLE}</style></head>"
    return f'<!doctype html>\n<html lang="en">{head}<body><main>{"".join(parts)}</main></body></html>\n'


def _head(verdict: Verdict) -> str:
    kind = "good" if verdict.conforms else "bad" if verdict.failures or verdict.error else "none"
    words = {"good": "keeps the contract", "bad": "does not keep the contract", "none": "has no verdict yet"}[kind]
    counts = verdict.counts
    facts = [
        (f"{counts['passed'] + counts['refused']:,}", f"of {sum(verdict.denominator.values()):,} items met"),
        (f"{counts['failed']:,}", "failed"),
        (f"{counts['refused']:,}", "met by refusing alike"),
        (f"{counts['unjudged']:,}", "not judged"),
        (f"{counts['known']:,}", "known failures"),
        (", ".join(verdict.tiers_run) or "none in full", "tiers run"),
        (", ".join(tier for tier in verdict.denominator if tier not in verdict.tiers_run) or "none", "not run"),
    ]
    items = "".join(f"<li><b>{escape(value)}</b><span>{escape(text)}</span></li>" for value, text in facts)
    source = verdict.source
    clean = "clean tree" if source.get("clean") else "not a clean tree"
    commit = source.get("commit", "")[:12] or "none"
    package = f"{source.get('distribution', '')} {source.get('version', '')}".strip() or "not installed"
    where = f"{package} · commit {commit}"
    return (
        f'<h1>draftmark contract</h1><p class="verdict"><b>{escape(verdict.backend)}</b> '
        f'<span class="{kind}">{words}</span></p><div class="line">{escape(verdict.line)}</div>'
        f'<ul class="facts">{items}</ul><p class="soft">{escape(where)} · {clean} · files '
        f"{source.get('files_sha256', '')[:12]}</p>" + (f"<p>{escape(verdict.error)}</p>" if verdict.error else "")
    )


def _checks(verdict: Verdict) -> str:
    rows = []
    ended: dict[str, Counter[str]] = {}
    for result in verdict.results:
        ended.setdefault(result.item.partition("[")[0], Counter())[result.outcome.value] += 1
    for check in all_checks():
        counts = ended.get(check.name, Counter())
        total, met = sum(counts.values()), counts["passed"] + counts["refused"]
        state = f'<span class="{"bad" if counts["failed"] else "good"}">{met} / {total}</span>' if total else "not run"
        bugs = ", ".join(check.bugs)
        rows.append(
            f'<tr><td class="m">{escape(check.name)}</td><td>{escape(check.doc)}'
            f'<div class="soft">{escape(bugs)}</div></td><td>{check.tier.value}</td><td class="n">{state}</td>'
            f'<td class="n">{counts["refused"] or ""}</td></tr>'
        )
    head = '<tr><th>check</th><th>rule, and the bugs it is known from</th><th>tier</th><th class="n">met</th>'
    head += '<th class="n">refused</th></tr>'
    return f'<h2>Checks</h2><div class="scroll"><table>{head}{"".join(rows)}</table></div>'


def _buffers(verdict: Verdict, subject: BackendUnderTest | None) -> str:
    try:
        subject = subject or BackendUnderTest(load(verdict.backend), "cpu", Tier.SIZING)
        geometry = sample_geometry(subject)
        rows = buffer_rows(subject, geometry) if geometry else []
    except (DraftmarkError, ContractViolation) as error:
        return f"<h2>Buffers</h2><p>cannot be shown: {escape(str(error))}</p>"
    if geometry is None:
        return "<h2>Buffers</h2><p>No sample geometry is served.</p>"
    body = "".join(map(_buffer, rows))
    total = sum(row.nbytes for row in rows)
    head = '<tr><th>buffer</th><th>shape</th><th>formula</th><th class="n">needed</th><th class="n">declared</th>'
    key = '<p class="soft key"><i style="background:var(--sea)"></i>needed<i style="background:var(--foam)"></i>slack'
    return (
        f"<h2>Buffers</h2><p>{escape(brief(geometry))}</p>"
        f'{key}<i style="background:var(--bad)"></i>lacking</p>'
        f'<div class="scroll"><table>{head}<th>depth</th><th class="n">slack</th><th class="n">bytes</th></tr>'
        f'{body}<tr><td colspan="7">total</td><td class="n">{total:,}</td></tr></table></div>'
    )


def _buffer(row: BufferRow) -> str:
    return (
        f'<tr><td class="m">{escape(row.name)}<div class="soft">{escape(row.role)}</div></td>'
        f'<td class="m">{escape(row.shape)} {escape(row.dtype)}</td><td class="m">{escape(row.formula)}</td>'
        f'<td class="n">{row.needed:,}</td><td class="n">{row.declared:,}</td>'
        f"<td>{drawings.bar_svg(row.needed, row.declared)}</td>"
        f'<td class="n">{100 * row.slack:+.1f} %</td><td class="n">{row.nbytes:,}</td></tr>'
    )


def _batch() -> str:
    figures = [
        ("Draft tree", drawings.tree_svg(), "Rows that VERIFY decides at once; row 0 is the token already known."),
        (
            "Tail mask",
            drawings.mask_svg(PREFIXES[0]),
            "Each row sees the whole prefix, its ancestors and itself. Only the tail has mask bits.",
        ),
        (
            "Page table, 16 tokens a page",
            drawings.page_table_svg(16),
            "Prefix and tail share pages; the padded request touches the null page 0 only.",
        ),
    ]
    drawn = "".join(
        f"<figure><h3>{escape(title)}</h3>{svg}<figcaption>{escape(text)}</figcaption></figure>"
        for title, svg, text in figures
    )
    key = "".join(
        f'<i style="background:{colour}"></i>{text}'
        for colour, text in (("#2b7f9c", "prefix"), ("#c9751a", "tail"), ("#7b8794", "null"), ("#aab4be", "free"))
    )
    return f'<h2>A batch, drawn</h2><p class="soft key">{key}</p><div class="row">{drawn}</div>'


def _failures(verdict: Verdict) -> str:
    shown = (Outcome.FAILED, Outcome.KNOWN, Outcome.UPCOMING)
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in verdict.results:
        if result.outcome in shown:
            groups.setdefault((result.item.partition("[")[0], result.outcome.value), []).append(result)
    if not groups:
        return ""
    blocks = "".join(_failure(verdict, results) for results in groups.values())
    return f"<h2>Failures</h2><p>The first of each check, ready to paste into a bug report.</p>{blocks}"


def _failure(verdict: Verdict, results: list[Result]) -> str:
    first, others = results[0], results[1:]
    source = verdict.source
    version = source.get("version") or "not installed"
    header = f"backend {verdict.backend} ({version}), commit {source.get('commit', '') or 'none'}"
    text = f"{first.item}\n{header}\n{first.message}"
    kind = "" if first.outcome is Outcome.FAILED else ' class="known"'
    also = ", ".join(result.item.partition("[")[2].rstrip("]") for result in others[:ALSO])
    more = f" and {len(others) - ALSO} more" if len(others) > ALSO else ""
    also = f'<p class="also soft">also: {escape(also + more)}</p>' if others else ""
    count = f" · {len(results)} items" if others else ""
    return (
        f"<details open{kind}><summary>{escape(first.item)} · {first.outcome.value}{count}</summary>"
        f"<pre>{escape(text)}</pre>{also}</details>"
    )
