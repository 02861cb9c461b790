"""Every distribution could be published: metadata, licence, types, bounds, and a README that works on an index."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.release.distributions import ROOT, Distribution, core_version, distributions, faults, siblings
from tools.release.readme import for_index, relative_links

ALL = distributions()
EACH = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


@EACH
def test_it_could_be_published(one):
    """Version, licence, classifiers, URL, py.typed, and an upper bound on whatever it asks for."""
    assert faults(one) == []


@EACH
def test_its_readme_works_on_an_index(one):
    """As it goes into the wheel, no link of its README is relative."""
    text = (one.folder / one.project["readme"]).read_text()
    assert relative_links(for_index(text)) == []


def test_each_comes_behind_what_it_asks_for():
    """The order of publishing leaves no moment in which one cannot be installed."""
    names = [one.name for one in ALL]
    assert names[0] == "draftmark" and len(set(names)) == len(names) >= 8
    for place, one in enumerate(ALL):
        assert siblings(one) - {one.name} <= set(names[:place])


def test_what_is_missing_is_told():
    """Another version, an open requirement and a missing URL are a sentence each."""
    first = ALL[0]
    project = first.project | {
        "version": "9.9",
        "urls": {},
        "dependencies": ["torch>=2.11", "draftmark-engines>=0.0.1,<9"],
    }
    told = faults(replace(first, project=project))
    assert any("draftmark-engines>=0.0.1,<9 is not >=" in one for one in told)
    assert f"draftmark: its version is 9.9, and the core's {core_version()}" in told
    assert "draftmark: it has no URL" in told and "draftmark: torch>=2.11 has no upper bound" in told


def test_a_folder_without_types_and_licence_is_told(tmp_path):
    """py.typed and LICENSE are looked for in the folder, not in its claims."""
    told = faults(Distribution(tmp_path, ALL[0].project))
    assert any("no licence" in fault for fault in told) and any("no py.typed" in fault for fault in told)


def test_a_relative_link_becomes_its_text_and_a_picture_goes():
    """Links with a scheme and anchors stay, what a block prints too."""
    text = "See [notes](NOTES.md) and [site](https://example.org).\n\n![plot](../a.svg)\n\n```\n[x](y.md)\n```\n"
    made = for_index(text)
    assert made == "See notes and [site](https://example.org).\n\n\n\n```\n[x](y.md)\n```\n"
    assert relative_links(text) == ["NOTES.md", "../a.svg"] and relative_links(made) == []


def test_the_head_of_the_changelog_is_the_notes():
    """The notes are the changelog's first section, which is not empty."""
    from tools.release.notes import notes

    text = notes((ROOT / "CHANGELOG.md").read_text())
    assert text.startswith("## ") and text.count("\n## ") == 0 and len(text) > 200
    with pytest.raises(ValueError, match="has no section"):
        notes("# Changelog\n")
