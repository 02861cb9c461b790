"""Stubs for packages that are not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from draftmark_sglang.judge.absent import AbsentPackages


@pytest.fixture
def finder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a finder for a package that does not exist, and for torch, which is installed."""
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, AbsentPackages(("no_such_kernels", "torch"))])


def test_stub_can_be_imported_but_not_called(finder: None) -> None:
    """Importing a name from a stub works, and calling it raises: SGLang imports device code at the top of files."""
    module = importlib.import_module("no_such_kernels.quant.fp8")
    with pytest.raises(NotImplementedError, match=r"no_such_kernels\.quant\.fp8\.quantize\.per_token is not installed"):
        module.quantize.per_token(1)
    for name in [name for name in sys.modules if name.startswith("no_such_kernels")]:
        del sys.modules[name]


def test_installed_package_is_not_replaced(finder: None) -> None:
    """Python uses the finder only for modules that no other finder has found."""
    assert importlib.util.find_spec("torch").origin.endswith("__init__.py")


def test_other_packages_stay_missing(finder: None) -> None:
    """The finder does not find packages outside its list."""
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package_at_all")
