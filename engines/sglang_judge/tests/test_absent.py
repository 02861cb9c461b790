"""Tests of the stubs that the judge installs for absent packages."""

from __future__ import annotations

import importlib
import sys

import pytest

from draftmark_sglang_judge.absent import AbsentPackages


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the stub finder for two packages: one that does not exist, and torch, which is installed."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, AbsentPackages(("no_such_kernels", "torch"))])


def test_stub_can_be_imported_but_not_called(finder: None) -> None:
    """Importing a name from a stub package works, and calling the name raises."""
    module = importlib.import_module("no_such_kernels.quant.fp8")
    with pytest.raises(NotImplementedError, match=r"no_such_kernels\.quant\.fp8\.quantize\.per_token is not installed"):
        module.quantize.per_token(1)
    for name in [name for name in sys.modules if name.startswith("no_such_kernels")]:
        del sys.modules[name]


def test_installed_package_is_not_replaced(finder: None) -> None:
    """An installed package gets no stub, even if it is in the stub finder's list."""
    assert importlib.util.find_spec("torch").origin.endswith("__init__.py")


def test_other_packages_stay_missing(finder: None) -> None:
    """An absent package that is not in the stub finder's list stays absent."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package_at_all")
