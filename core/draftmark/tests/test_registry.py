"""Discovery of backends, from installed metadata only and by exact name."""

from __future__ import annotations

import sys

import pytest

import draftmark
from draftmark.errors import BackendLoadError, LoadFailure
from draftmark.registry import BACKEND_VARIABLE, available


def rows(name):
    """Return the rows of available() with this name."""
    return [row for row in available() if row.name == name]


def test_the_reference_is_registered_like_any_other():
    """The reference backend uses the same entry-point group as plugins."""
    (row,) = rows("reference")
    assert (row.module, row.distribution, row.contract_major) == (
        "draftmark_reference:ReferencePlugin",
        "draftmark-reference",
        1,
    )
    assert row.version == draftmark.__version__


def test_available_reads_metadata_and_imports_nothing(distribution):
    """A backend with a failing import is listed with module, distribution and version, and is not imported."""
    distribution("sunken", source="raise RuntimeError('must not be imported')")
    (row,) = rows("sunken")
    assert (row.module, row.distribution, row.version) == ("throwaway_draftmark_sunken", "draftmark-sunken", "1.0")
    assert row.module not in sys.modules


def test_available_lists_other_contract_majors(distribution):
    """A plugin for contract v2 is listed with its major."""
    distribution("future", group="draftmark.backends.v2")
    assert [row.contract_major for row in rows("future")] == [2]


def test_available_is_sorted_and_ignores_other_groups(distribution):
    """Rows are sorted by name; entry points of other groups, also of similar names, are not backends."""
    distribution("zulu")
    distribution("alpha")
    distribution("script", group="console_scripts")
    distribution("similar", group="draftmark.backends.v1.extras")
    names = [row.name for row in available()]
    assert names == sorted(names)
    assert {"alpha", "reference", "zulu"} <= set(names)
    assert not {"script", "similar"} & set(names)


def test_a_distribution_found_twice_is_one_backend(distribution):
    """An editable install and a copy of one distribution are not a conflict, also with another spelling of its name."""
    distribution("twice", project="draftmark-twice")
    distribution("twice", project="draftmark_twice")
    assert len(rows("twice")) == 1
    assert draftmark.load("twice").name == "twice"


def test_a_distribution_without_metadata_hides_no_others(distribution):
    """A half-removed dist-info (entry points, no METADATA) does not hide other backends."""
    distribution("halfgone", metadata="")
    assert rows("reference")
    assert draftmark.load("reference").name == "reference"


def test_a_malformed_entry_point_file_hides_no_others(distribution):
    """A malformed line in one distribution's entry points does not hide other backends."""
    distribution("garbled", entries="[draftmark.backends.v1]\nthis line is no entry point\n")
    assert rows("reference")
    assert draftmark.load("reference").name == "reference"


def test_load_takes_the_name_from_the_environment(monkeypatch, distribution):
    """DRAFTMARK_BACKEND names the backend if the caller does not; the caller's name has priority."""
    distribution("chosen")
    monkeypatch.setenv(BACKEND_VARIABLE, "chosen")
    assert draftmark.load().name == "chosen"
    assert draftmark.load("reference").name == "reference"


def test_load_without_a_name_selects_no_backend(monkeypatch):
    """Without a name and a variable load raises an error, although a backend is installed."""
    monkeypatch.delenv(BACKEND_VARIABLE, raising=False)
    with pytest.raises(BackendLoadError) as caught:
        draftmark.load()
    assert caught.value.failure is LoadFailure.ENTRY_POINT_MISSING


def test_each_load_has_its_own_plugin_manager(distribution):
    """Each load has its own manager, so registering one backend never affects another."""
    distribution("left")
    distribution("right")
    first, second, again = draftmark.load("left"), draftmark.load("right"), draftmark.load("left")
    assert (first.info.name, second.info.name, again.info.name) == ("left", "right", "left")
    assert len({id(backend._hooks) for backend in (first, second, again)}) == 3


def test_an_object_can_be_a_backend(distribution):
    """An entry point may name an object with the hooks as methods."""
    distribution(
        "object",
        entries="[draftmark.backends.v1]\nobject = throwaway_draftmark_object:PLUGIN\n",
        extra=(
            "class Plugin: pass\nPLUGIN = Plugin()\n"
            "for _name in [n for n in globals() if n.startswith('draftmark_')]:\n"
            "    setattr(PLUGIN, _name, globals()[_name])\n"
        ),
    )
    assert draftmark.load("object").info.name == "object"
