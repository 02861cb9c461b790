"""Functions for probes: create SGLang objects without their constructors, and report names that a release lacks."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import Unjudged


def member(module: str, name: str) -> Any:
    """Return a class or function of the installed SGLang.

    Raises:
        Unjudged: this release lacks the name, or imports a package that is not installed.
    """
    try:
        return getattr(importlib.import_module(f"sglang.{module}"), name)
    except ModuleNotFoundError as error:
        lacks = str(error.name)
        if lacks.partition(".")[0] != "sglang":
            remedy = "pip install sglang brings it"
            raise Unjudged(f"SGLang imports {lacks}, which is not installed; {remedy}") from error
        raise Unjudged(f"this release has no module {lacks}, which should contain {name}") from error
    except (ImportError, AttributeError) as error:
        raise Unjudged(f"this release has no sglang.{module}.{name}: {error}") from error


def bare(kind: Any, **attributes: Any) -> Any:
    """Create an object of a class without its constructor.

    If a method reads an attribute that `attributes` lacks, it raises `Unjudged`: the probe does not fit the release.
    """

    def lacks(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unjudged(f"{kind.__name__} of this release reads {name!r}, which the probe does not set")

    made: Any = object.__new__(type(kind.__name__, (kind,), {"__getattr__": lacks}))
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def translator(req_to_token: torch.Tensor) -> Any:
    """Return a stand-in for the KV index translator of newer releases; it returns `req_to_token` itself."""

    def read_source(plan: Any, *, req_pool_indices: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(
            row_ids=req_pool_indices,
            ids=req_to_token,
            row_stride=req_to_token.stride(0),
            entry_page_size=1,
            is_translated=False,
            v2p=None,
        )

    return SimpleNamespace(read_source=read_source, is_translating=False, reads_are_translated=False)
