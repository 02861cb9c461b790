"""Tests that every distribution can be published: metadata, licence, types, bounds, and README without dead links."""

from __future__ import annotations

import json
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tools.release.bill import bill, installed
from tools.release.distributions import ROOT, Distribution, core_version, distributions, faults, siblings
from tools.release.publisher import AUTHORS, PLACEHOLDER, filled, urls
from tools.release.readme import for_index, relative_links

ALL = distributions()
PACKAGES = installed(Path(sys.prefix))
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
    assert (
        any("draftmark-core: its URLs are not" in one for one in found)
        and "draftmark-core: torch>=2.11 has no upper bound" in found
    )


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


def test_notes_are_short_and_stand_before_the_details():
    """Release notes are the start of the changelog's first section, at most 20 lines, without its headings."""
    from tools.release.notes import MOST_LINES, notes

    text = notes((ROOT / "CHANGELOG.md").read_text())
    assert text.startswith("## ") and "\n#" not in text and 10 < text.count("\n") <= MOST_LINES
    linked = notes("## 1\n\n[Verdicts](README.md#verdicts), [site](https://example.org).\n", "https://example.org/team")
    assert linked.endswith(
        "[Verdicts](https://example.org/team/blob/main/README.md#verdicts), [site](https://example.org).\n"
    )
    with pytest.raises(ValueError, match="has no section"):
        notes("# Changelog\n")
    with pytest.raises(ValueError, match="the notes have 22 lines, at most 20"):
        notes("# Changelog\n## 1\n" + "* a change\n" * 21)


def test_one_variable_fills_the_urls():
    """A repository replaces the placeholder in each URL. A text without placeholder, or a wrong URL, is refused."""
    text = (ALL[0].folder / "pyproject.toml").read_text()
    made = filled(text, "https://example.org/team/draftmark")
    assert tomllib.loads(made)["project"]["urls"] == urls("https://example.org/team/draftmark")
    assert PLACEHOLDER not in made and len(made.splitlines()) == len(text.splitlines())
    with pytest.raises(ValueError, match=r"REPOSITORY is 'example.org/'; write an https URL"):
        filled(text, "example.org/")
    with pytest.raises(ValueError, match="has no URL that begins with"):
        filled(made, "https://example.org/other")


def test_licence_names_its_holder():
    """The LICENSE of the repository, and so of each distribution, names the holder."""
    assert f"Copyright 2026 {AUTHORS}\n" in (ROOT / "LICENSE").read_text()


@EACH
def test_bill_of_materials_has_each_package_once(one):
    """A distribution's SBOM has the distribution, and each installed requirement once, with its version."""
    content = json.loads(bill(one, ALL, PACKAGES))
    names = [each["name"] for each in content["components"]]
    assert content["metadata"]["component"]["purl"] == f"pkg:pypi/{one.name}@{core_version()}"
    assert len(set(names)) == len(names)
    refs = {each["ref"] for each in content["dependencies"]}
    assert refs == {one.name, *names}
    assert all(set(each["dependsOn"]) <= refs for each in content["dependencies"])
    known = {each["name"]: each["version"] for each in content["components"] if "version" in each}
    bare = {each["name"] for each in content["components"] if "licenses" not in each}
    unlicensed = {name for name, one in PACKAGES.items() if not any("License" in field for field in one.metadata)}
    assert bare - unlicensed <= {"flashinfer-python", "torch-npu"}, "packages that are not installed here"
    assert all(known[name] == PACKAGES[name].version for name in set(known) & {"torch", "triton", "pluggy", "numpy"})
