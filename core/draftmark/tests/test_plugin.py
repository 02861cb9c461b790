"""Backend plugins that are classes: required members, defaults, and errors for wrong classes."""

from __future__ import annotations

import pytest
import torch

import draftmark
from draftmark import (
    BackendHookError,
    BackendLoadError,
    BackendRefusal,
    BatchSize,
    HostLengthsNeed,
    LoadFailure,
    Mode,
    Requirements,
)
from draftmark.runtime import GraphState, TorchTreeOps

CPU = torch.device("cpu")
CLASS = """
from draftmark import BackendInfo, BackendPlugin

class Plugin(BackendPlugin):
    info = BackendInfo("classy", "any", 0, True)

    def buffers(self, geometry):
        return []

    def open_backend(self, geometry, arena):
        raise RuntimeError("not in this test")
"""


@pytest.fixture
def load_class(distribution):
    """Return a function that loads a backend named classy from source with a class Plugin."""

    def load(source):
        distribution(
            "classy", source=source, entries="[draftmark.backends.v1]\nclassy = throwaway_draftmark_classy:Plugin\n"
        )
        return draftmark.load("classy")

    return load


def test_three_members_are_enough(load_class, make_geometry):
    """By default all geometries are served, nothing is required, and graphs and tree operations use torch."""
    backend, geometry = load_class(CLASS), make_geometry()
    assert backend.supports(geometry) == [] and backend.buffers(geometry) == []
    assert backend.requirements(geometry) == Requirements(HostLengthsNeed.NONE, unique_slots=False)
    assert isinstance(backend.graph_state(geometry, CPU), GraphState)
    assert isinstance(backend.tree_ops(geometry, CPU), TorchTreeOps)


@pytest.mark.parametrize("missing", ["buffers", "open_backend"])
def test_a_class_without_a_required_method_is_refused(load_class, missing):
    """The error has the missing method and the base class, instead of Python's TypeError."""
    with pytest.raises(
        BackendLoadError, match=f"Plugin does not define {missing}; see draftmark.BackendPlugin"
    ) as caught:
        load_class(CLASS.replace(f"def {missing}(", "def something_else("))
    assert caught.value.failure is LoadFailure.MISSING_HOOK


def test_a_method_with_wrong_arguments_is_refused(load_class):
    """pluggy checks only the marked hooks, so load checks the arguments of the plain methods too."""
    with pytest.raises(BackendLoadError, match=r"Plugin\.buffers.*write buffers\(self, geometry\)") as caught:
        load_class(CLASS.replace("buffers(self, geometry)", "buffers(self)"))
    assert caught.value.failure is LoadFailure.WRONG_SIGNATURE


def test_a_class_without_info_is_refused(load_class):
    """`info` has no default, so a class without it raises a load error."""
    with pytest.raises(BackendLoadError, match=r"describe\(\) raised AttributeError.*info"):
        load_class(CLASS.replace("info = ", "about = "))


def test_a_constructor_that_raises_is_an_import_error(load_class):
    """An exception of the plugin class constructor is an import error."""
    with pytest.raises(BackendLoadError, match=r"Plugin\(\) raised KeyError: 'aground'") as caught:
        load_class(CLASS + "\n    def __init__(self):\n        raise KeyError('aground')\n")
    assert caught.value.failure is LoadFailure.IMPORT_ERROR


def test_kernel_hooks_are_optional(load_class, make_geometry):
    """Without `warm` and `explain` a plugin has nothing to compile and nothing to explain."""
    backend, geometry = load_class(CLASS), make_geometry()
    assert backend.warm([geometry]) is None
    assert backend.explain(geometry, BatchSize(Mode.DECODE, 1, 1)) is None


@pytest.mark.parametrize(
    ("method", "hook"),
    [
        ("def warm(self, geometry, progress):\n        return 7", "warm"),
        ("def explain(self, *_):\n        return 7", "explain"),
    ],
)
def test_kernel_hooks_return_their_type(load_class, make_geometry, method, hook):
    """A wrong return value of `warm` or `explain` is an error that names the hook."""
    backend, geometry = load_class(f"{CLASS}\n    {method}\n"), make_geometry()
    with pytest.raises(BackendHookError, match=rf"{hook}\(\) must return .* got 7"):
        backend.warm([geometry]) if hook == "warm" else backend.explain(geometry, BatchSize(Mode.DECODE, 1, 1))


def test_warm_refuses_a_geometry_that_is_not_served(load_class, make_geometry):
    """`warm` compiles nothing for a geometry that the backend refuses."""
    text = "def supports(self, geometry):\n        return ['too big']\n\n    def warm(self, *_):\n        1 / 0\n"
    with pytest.raises(BackendRefusal, match="too big"):
        load_class(f"{CLASS}\n    {text}\n").warm([make_geometry()])


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"DRAFTMARK_CACHE_DIR": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"DRAFTMARK_CACHE_DIR": "", "XDG_CACHE_HOME": "/x"}, "/x/draftmark"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/draftmark"),
    ],
)
def test_cache_folder_follows_the_environment(monkeypatch, variables, folder):
    """DRAFTMARK_CACHE_DIR comes first, then XDG_CACHE_HOME, then the home directory; nothing is created."""
    monkeypatch.delenv("DRAFTMARK_CACHE_DIR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(draftmark.cache_folder()) == folder


@pytest.mark.parametrize(
    ("device", "variable", "calls"), [("cpu", "", []), ("cuda:1", "", [2]), ("cuda:1", "1", [2]), ("cuda:1", "0", [])]
)
def test_prepare_compiles_all_geometries_together(load_class, make_geometry, monkeypatch, device, variable, calls):
    """`prepare` is one `warm` of all geometries on an accelerator; nothing on a CPU or with DRAFTMARK_PREPARE=0."""
    monkeypatch.setenv("DRAFTMARK_PREPARE", variable)
    text = "seen = []\n\n    def warm(self, geometries, progress):\n        self.seen.append(len(geometries))\n"
    backend = load_class(f"{CLASS}\n    {text}")
    backend.prepare([make_geometry(), make_geometry()], device)
    assert backend.plugin.seen == calls


def test_opened_backend_and_its_graphs_are_logged(caplog):
    """One INFO record of the logger `draftmark` names the backend, heads and modes, and one the kind of graphs."""
    geometry = draftmark.Geometry.create(draftmark.AttentionShape(4, 2, 32, 16), draftmark.Limits(2, 64))
    with caplog.at_level("INFO", "draftmark"):
        loaded = draftmark.load("reference")
        loaded.open(geometry, "cpu", guard=True)
        loaded.graph_state(geometry, torch.device("cpu"))
    opened, graphs = [one.message for one in caplog.records if one.name == "draftmark"]
    assert opened.startswith(
        "backend reference serves 4/2 heads of 32 on cpu, modes extend, decode, verify; every call"
    )
    assert graphs.startswith("backend reference records graphs with") and graphs.endswith("on cpu")
