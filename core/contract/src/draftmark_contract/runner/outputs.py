"""Writer of a verdict's output files."""

from __future__ import annotations

from pathlib import Path

from .record import full_record, short_record, write
from .report import write_page
from .verdict import Verdict


def write_outputs(
    verdict: Verdict, json_path: str | None, record_path: str | None = None, html_path: str | None = None
) -> None:
    """Write the full JSON, the short record and the HTML page. A path of None skips that file."""
    if json_path:
        write(full_record(verdict), Path(json_path))
    if record_path:
        write(short_record(verdict), Path(record_path))
    if html_path:
        write_page(verdict, Path(html_path))
