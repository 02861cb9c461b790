"""Correct plugins under names of their own, as base classes of mutants. Imports neither torch nor the suite."""

from __future__ import annotations

from dataclasses import replace

from draftmark_tugboat import Plugin as TutorialPlugin

from draftmark import BackendPlugin
from draftmark_cuda_triton import TritonPlugin
from draftmark_reference import ReferencePlugin

from ..designs.csr_plugin import CsrPlugin

BASES: dict[str, type[BackendPlugin]] = {
    "reference": ReferencePlugin,
    "csr": CsrPlugin,
    "tutorial": TutorialPlugin,
    "cuda_triton": TritonPlugin,
}
"""Plugin by layout. The module `tutorial` writes the tutorial's package to a folder on the path."""


def named(name: str, base: type[BackendPlugin]) -> type[BackendPlugin]:
    """Return a subclass of a correct plugin with another name."""
    return type(name, (base,), {"info": replace(base.info, name=name), "__module__": base.__module__})


twin_reference = named("twin_reference", ReferencePlugin)
twin_csr = named("twin_csr", CsrPlugin)
twin_tutorial = named("twin_tutorial", TutorialPlugin)
twin_cuda_triton = named("twin_cuda_triton", TritonPlugin)
