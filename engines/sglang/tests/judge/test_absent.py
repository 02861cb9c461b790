"""Packages that are not there."""

from __future__ import annotations

import importlib
import sys

import pytest

from draftmark_sglang.judge.absent import AbsentPackages


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a package of no distribution, and for torch, which is there."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, AbsentPackages(("no_such_kernels", "torch"))])


def test_a_name_of_it_is_imported_and_not_called(finder: None) -> None:
    """SGLang imports at the top of a file what it calls on a device alone."""
    module = importlib.import_module("no_such_kernels.quant.fp8")
    with pytest.raises(NotImplementedError, match=r"no_such_kernels\.quant\.fp8\.quantize\.per_token is not installed"):
        module.quantize.per_token(1)
    for name in [name for name in sys.modules if name.startswith("no_such_kernels")]:
        del sys.modules[name]


def test_what_is_installed_is_not_replaced(finder: None) -> None:
    """It is the last finder that is asked."""
    assert importlib.util.find_spec("torch").origin.endswith("__init__.py")


def test_nothing_else_is_found(finder: None) -> None:
    """A package that nobody named is missing as ever."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package_at_all")
