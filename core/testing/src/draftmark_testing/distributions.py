"""Temporary distributions that register a backend."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BACKEND_SOURCE = """from draftmark import BackendInfo, hookimpl
from draftmark.hookspecs import hooks_of
from draftmark_reference import ReferencePlugin

globals().update(vars(hooks_of(ReferencePlugin())))

def contract_notes():
    from draftmark_reference import contract
    return contract

@hookimpl
def draftmark_describe():
    return BackendInfo(**{info!r})
"""
"""Module of a whole backend: the reference's hooks under another name. Tests append code that breaks it."""


@dataclass
class Distributions:
    """Writer of temporary distributions below `root`; `modules` lists the modules that it wrote."""

    root: Path
    modules: list[str] = field(default_factory=list)

    def write(
        self,
        backend: str,
        *,
        project: str | None = None,
        extra: str = "",
        source: str | None = None,
        entries: str | None = None,
        group: str = "draftmark.backends.v1",
        metadata: str = "Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n",
        **info: Any,
    ) -> Path:
        """Write a distribution with one backend and return its folder, which is to be put on ``sys.path``.

        Args:
            backend: name of the backend.
            project: name of the distribution; by default made from `backend`.
            extra: text that is appended to the module.
            source: text that replaces the module's.
            entries: content of entry_points.txt; by default it names the module, or its class Plugin if it has one.
            group: entry-point group.
            metadata: content of METADATA; "" for none.
            info: fields of the backend's `BackendInfo`.
        """
        project = project or f"draftmark-{backend}"
        module = f"throwaway_{project.replace('-', '_')}"
        self.modules.append(module)
        site = self.root / f"site{len(self.modules)}"
        folder = site / f"{project.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (site / module).mkdir()
        fields = {"name": backend, "device": "any", "contract_minor": 0, "host_kernels": True} | info
        text = (BACKEND_SOURCE.format(info=fields) if source is None else source) + "\n" + extra
        (site / module / "__init__.py").write_text(text)
        if metadata:
            (folder / "METADATA").write_text(metadata.format(project=project))
        target = f"{module}:Plugin" if "class Plugin" in text else module
        (folder / "entry_points.txt").write_text(entries or f"[{group}]\n{backend} = {target}\n")
        return site
