"""Writes a verdict's output files. Each file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .page import page
from .record import as_text, full_record, short_record
from .verdict import Verdict


def write_outputs(
    verdict: Verdict,
    json_path: str | None,
    record_path: str | None = None,
    html_path: str | None = None,
    more: Mapping[str, Any] | None = None,
) -> list[str]:
    """Write the full JSON, the short record and the HTML page. Return one sentence for each file that failed.

    A path of None skips that file. `more` has further keys for the JSON. The caller writes only what
    `Verdict.recorded` allows.
    """
    makers: list[tuple[str | None, Callable[[Verdict], str]]] = [
        (json_path, lambda one: as_text({**full_record(one), **(more or {})})),
        (record_path, lambda one: as_text(short_record(one))),
        (html_path, page),
    ]
    return [problem for path, make in makers if path and (problem := write_whole(Path(path), make(verdict)))]


def write_whole(path: Path, text: str) -> str:
    """Write a file next to `path`, then rename it to `path`. Return "", or a sentence about the failure.

    After a failure the earlier file at `path` is unchanged. A pipe or a device is written directly.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        return _write(path, text, path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        return _write(part, text, path) or _rename(part, path)
    finally:
        part.unlink(missing_ok=True)


def _write(to: Path, text: str, named: Path) -> str:
    try:
        to.write_text(text, encoding="utf-8")
    except OSError as error:
        return _problem(named, error)
    return ""


def _rename(part: Path, path: Path) -> str:
    try:
        os.replace(part, path)
    except OSError as error:
        return _problem(path, error)
    return ""


def _problem(path: Path, error: OSError) -> str:
    return f"{path} was not written: {error.strerror}; free space there or name another file, then run again"
