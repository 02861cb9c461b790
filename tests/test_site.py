"""Tests of the site: its pages are collected from the repository, and broken pages are reported."""

from __future__ import annotations

import json

import pytest

from draftmark_tools.cli.commands import installed
from tools.docs import commands, links, matrix, staging
from tools.docs.kills import ROOT

RECORD = {
    "backend": "tugboat",
    "contract": "1.4",
    "verdict": "does not conform",
    "profiles": ["core"],
    "tiers_run": ["sizing"],
    "runs": [],
    "checks": {"load.describes_itself": {"passed": 1}, "sizing.covers": {"failed": 2, "passed": 3}},
}


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Return the folder with the collected sources of the site."""
    folder = tmp_path_factory.mktemp("build") / "docs"
    staging.stage(folder)
    return folder


def test_every_page_of_the_menu_exists(staged):
    """Every page in the menu exists, the generated pages included."""
    menu = json.loads(staged.with_suffix(".yml").read_text())["nav"]
    named = [page for part in menu for pages in part.values() for entry in pages for page in entry.values()]
    assert {"index.md", "museum.md", "cli.md", "compatibility.md", "hooks.md", "changelog.md"} <= set(named)
    assert all((staged / page).is_file() for page in named)


def test_link_into_the_repository_leads_to_a_page(staged):
    """A link to a source file of the repository becomes a link to a page of the site that shows the file."""
    assert "(source/core/contract/src/draftmark_contract/profiles.py.md)" in (staged / "contract.md").read_text()
    shown = (staged / "source/core/contract/src/draftmark_contract/profiles.py.md").read_text()
    assert "class Profile(StrEnum)" in shown


def test_link_to_a_record_leads_to_its_section(staged, tmp_path):
    """A link to a benchmark record leads to the record's section, and that section links to the file."""
    staging.Stage(tmp_path).write("page.md", "[all](../benchmarks/results/cpu-ngram.json)", ROOT / "docs" / "page.md")
    assert (tmp_path / "page.md").read_text() == "[all](results-decode.md#cpu-ngram)"
    assert "(source/benchmarks/results/cpu-ngram.json)" in (staged / "results-decode.md").read_text()


def test_link_to_a_missing_file_stops_the_site(tmp_path):
    """A link to a missing file raises an error that names the file."""
    site = staging.Stage(tmp_path)
    with pytest.raises(ValueError, match=r"links to docs/nowhere\.py, which the repository does not have"):
        site.write("page.md", "[gone](nowhere.py)", ROOT / "docs" / "page.md")


def test_text_in_a_code_block_is_no_link(tmp_path):
    """Brackets in a code block are not changed to a link."""
    staging.Stage(tmp_path).write("page.md", "```python\nf[0](nowhere.py)\n```\n", ROOT / "docs" / "page.md")
    assert "f[0](nowhere.py)" in (tmp_path / "page.md").read_text()


def test_file_name_of_a_block_becomes_its_title(tmp_path):
    """The file name of a code block becomes its title, because Markdown would otherwise show the block as text."""
    staging.Stage(tmp_path).write("page.md", "```toml file=a/b.toml\nx = 1\n```\n", ROOT / "docs" / "page.md")
    assert (tmp_path / "page.md").read_text() == '```toml title="a/b.toml"\nx = 1\n```\n'


def test_every_command_has_its_reference():
    """The reference page of the command line has a section for each installed command."""
    page = commands.page()
    assert all(f"## draftmark {name}\n" in page for name in installed())
    assert "`--max-num-reqs` `N`" in page


def test_reference_does_not_depend_on_the_terminal(monkeypatch):
    """The reference page is equal for terminals of 40 and of 200 columns."""
    pages = set()
    for width in ("40", "200"):
        monkeypatch.setenv("COLUMNS", width)
        pages.add(commands.page())
    assert len(pages) == 1


def test_not_run_is_not_failed(tmp_path):
    """In the compatibility table, a failed rule, a rule that never ran and a plugin without a record differ."""
    (tmp_path / "contract-tugboat.json").write_text(json.dumps(RECORD))
    other = RECORD | {"backend": "barge", "checks": {"load.describes_itself": {"passed": 1}}}
    (tmp_path / "contract-barge.json").write_text(json.dumps(other))
    page = matrix.page(tmp_path, ["tugboat", "raft"])
    assert "| | `barge` | `tugboat` | `raft` |" in page
    assert "| sizing | not run | **2 failed**, 3 passed | not run |" in page
    assert "| core | **served** | **served** | not run |" in page
    assert "| window | not served | not served | not run |" in page
    assert "| engine forms | not run | not run | not run |" in page
    assert "| device | not run | not run | not run |" in page


def test_link_checker_finds_dead_links(tmp_path):
    """The checker reports a missing page, a missing anchor, a script from a network, and a code block shown as text."""
    (tmp_path / "a.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#here">b</a><a href="https://example.org">e</a>'
    )
    (tmp_path / "b.html").write_text('<p id="here"></p><a href="a.html#top">a</a>')
    assert links.faults(tmp_path) == []
    (tmp_path / "a.html").write_text('<h1 id="top">A</h1><code>```sh</code><a href="b.html#here">b</a>')
    (tmp_path / "b.html").write_text(
        '<p>```toml file=x y</p><a href="c.html">c</a><script src="https://example.org/x.js"></script>'
    )
    assert links.faults(tmp_path) == [
        "a.html links to b.html#here: no anchor here",
        "b.html loads https://example.org/x.js from a network",
        "b.html shows '```toml file=x y' as text: Markdown did not recognise the block",
        "b.html links to c.html: no such file",
    ]
