"""Tests that every distribution can be published: metadata, licence, types, bounds, and README without dead links."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.release.distributions import ROOT, Distribution, core_version, distributions, faults, siblings
from tools.release.readme import for_index, relative_links

ALL = distributions()
EACH = pytest.mark.parametrize("one", ALL, ids=lambda one: one.name)


@EACH
def test_distribution_can_be_published(one):
    """A distribution has version, licence, classifiers, URL, py.typed, and upper bounds on its requirements."""
    assert faults(one) == []


@EACH
def test_readme_works_on_an_index(one):
    """The README in the wheel has no relative links."""
    text = (one.folder / one.project["readme"]).read_text()
    assert relative_links(for_index(text)) == []


def test_distributions_follow_their_requirements():
    """The list has each distribution after the distributions that it requires: the order of publication."""
    names = [one.name for one in ALL]
    assert names[0] == "draftmark-core" and len(set(names)) == len(names) >= 8
    for place, one in enumerate(ALL):
        needed = siblings(replace(one, project=one.project | {"optional-dependencies": {}}))
        assert needed <= set(names[:place])


def test_faults_of_metadata_are_reported():
    """A wrong version, a requirement without upper bound, and a missing URL give one sentence each."""
    first = ALL[0]
    project = first.project | {
        "version": "9.9",
        "urls": {},
        "dependencies": ["torch>=2.11", "draftmark-engines>=0.0.1,<9"],
    }
    found = faults(replace(first, project=project))
    assert any("draftmark-engines>=0.0.1,<9 must end with >=" in one for one in found)
    assert f"draftmark-core: its version is 9.9, but the core's is {core_version()}" in found
    assert "draftmark-core: it has no URL" in found and "draftmark-core: torch>=2.11 has no upper bound" in found


def test_folder_without_types_and_licence_is_reported(tmp_path):
    """A distribution without py.typed and LICENSE files is reported."""
    found = faults(Distribution(tmp_path, ALL[0].project))
    assert any("no licence" in fault for fault in found) and any("no py.typed" in fault for fault in found)


def test_relative_link_becomes_text_and_picture_is_removed():
    """In a README for a package index, relative links become text and pictures are removed; other links stay."""
    text = "See [notes](NOTES.md) and [site](https://example.org).\n\n![plot](../a.svg)\n\n```\n[x](y.md)\n```\n"
    made = for_index(text)
    assert made == "See notes and [site](https://example.org).\n\n\n\n```\n[x](y.md)\n```\n"
    assert relative_links(text) == ["NOTES.md", "../a.svg"] and relative_links(made) == []


def test_notes_are_the_first_section_of_the_changelog():
    """Release notes are the changelog's first section, which is not empty."""
    from tools.release.notes import notes

    text = notes((ROOT / "CHANGELOG.md").read_text())
    assert text.startswith("## ") and text.count("\n## ") == 0 and len(text) > 200
    with pytest.raises(ValueError, match="has no section"):
        notes("# Changelog\n")
