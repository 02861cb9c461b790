"""The command `draftmark list`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[..., Any]


def test_reference_is_listed(draftmark: Run) -> None:
    """The list contains the reference backend, with its package and contract."""
    done = draftmark("list")
    assert done.code == 0
    row = next(line for line in done.out.splitlines() if line.startswith("reference"))
    assert row.split()[1:] == ["draftmark-reference", "0.1.0", "v1", "draftmark_reference:ReferencePlugin"]


def test_json_has_a_schema_number(draftmark: Run) -> None:
    """`--json` prints one object with a schema number and a row per backend."""
    found = draftmark("list", "--json").json
    assert found["schema"] == 1
    assert {"name", "module", "distribution", "version", "contract_major", "note"} <= set(found["backends"][0])


def test_two_distributions_with_one_name_get_a_note(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """When two distributions register one backend name, each of the two rows has a note with the remedy."""
    distribution("twin", project="vendor-a")
    distribution("twin", project="vendor-b")
    rows = [row for row in draftmark("list", "--json").json["backends"] if row["name"] == "twin"]
    assert [row["distribution"] for row in rows] == ["vendor-a", "vendor-b"]
    assert all("uninstall all but one" in row["note"] for row in rows)


def test_another_contract_major_gets_a_note(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A backend for a later contract is listed with a note that names the release to install."""
    distribution("tomorrow", group="draftmark.backends.v2")
    assert "this core supports contract v1" in draftmark("list").out


def test_no_plugin_is_imported(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A plugin that would end the process during import is listed."""
    distribution("fatal", source="import os; os._exit(9)")
    assert "fatal" in draftmark("list").out


def test_list_works_with_a_broken_torch(run_python: Run, broken_torch: Path) -> None:
    """`list` and every --help succeed when `import torch` raises, and do not import torch."""
    code = (
        "import sys; from draftmark_tools.cli import main\n"
        "codes = [main(a) for a in (['list'], ['list', '--json'], ['--help'], ['generate', '--help'])]\n"
        "assert codes == [0, 0, 0, 0] and 'torch' not in sys.modules"
    )
    done = run_python(code, broken_torch)
    assert (done.returncode, done.err) == (0, "")


def test_narrow_terminals_cut_no_name(draftmark: Run, terminal: Callable[..., Any], distribution: Any) -> None:
    """On a terminal of 40 columns every name is whole; the terminal wraps the lines."""
    distribution("a_backend_with_a_rather_long_name")
    shown = terminal("stdout", 40)
    draftmark("list")
    for name in ("a_backend_with_a_rather_long_name", "draftmark_reference:ReferencePlugin"):
        assert name in shown.getvalue()


def test_metadata_cannot_move_the_cursor(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """Control characters in a distribution's metadata are not printed."""
    distribution("sly", metadata="Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\x1b[2J\n")
    assert "\x1b" not in draftmark("list").out
