"""SBOM of one distribution (CycloneDX 1.6): the distribution, and every package that pip installs with it.

Versions are those of an environment with everything, in which the tests ran. A package that is not installed there,
such as an engine, has no version.
"""

from __future__ import annotations

import importlib
import importlib.metadata as md
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .distributions import Distribution


def installed(environment: Path) -> dict[str, md.Distribution]:
    """Return the packages of an environment by their canonical name. The first one on its path counts."""
    site = [str(path) for path in environment.glob("lib/python*/site-packages")]
    found: dict[str, md.Distribution] = {}
    for one in md.distributions(path=site):
        found.setdefault(canonicalize_name(one.metadata["Name"]), one)
    return found


def bill(one: Distribution, every: Iterable[Distribution], packages: Mapping[str, md.Distribution]) -> str:
    """Return the SBOM of a distribution as JSON, with the requirements of its extras except `test`.

    Args:
        one: the distribution.
        every: all distributions of this repository.
        packages: packages of an environment, from `installed`.
    """
    own: dict[str, Distribution] = {canonicalize_name(each.name): each for each in every}
    waiting: list[str] = [canonicalize_name(one.name)]
    edges: dict[str, list[str]] = {}
    while waiting:
        name = waiting.pop()
        if name not in edges:
            edges[name] = sorted(_needed(name, own, packages))
            waiting += edges[name]
    root = canonicalize_name(one.name)
    components = {name: _component(name, own, packages) for name in sorted(edges)}
    content = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": components.pop(root)},
        "components": list(components.values()),
        "dependencies": [{"ref": name, "dependsOn": edges[name]} for name in sorted(edges)],
    }
    return json.dumps(content, indent=1) + "\n"


def check(text: str) -> None:
    """Check an SBOM against CycloneDX's schema, with the package cyclonedx-python-lib.

    Raises:
        ValueError: the SBOM does not follow the schema; the message has the first fault.
    """
    version = importlib.import_module("cyclonedx.schema").SchemaVersion.V1_6
    fault = importlib.import_module("cyclonedx.validation.json").JsonStrictValidator(version).validate_str(text)
    if fault is not None:
        raise ValueError(f"the SBOM does not follow CycloneDX 1.6: {fault}")


def _needed(name: str, own: Mapping[str, Distribution], packages: Mapping[str, md.Distribution]) -> set[str]:
    """Return the canonical names of a package's requirements; of this repository's packages also those of extras."""
    if name in own:
        extras = own[name].project.get("optional-dependencies", {})
        groups = [own[name].project.get("dependencies", []), *(extras[one] for one in extras if one != "test")]
        lines = [line for group in groups for line in group]
    else:
        lines = (packages[name].requires or []) if name in packages else []
    wanted = [Requirement(line) for line in lines]
    here = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {str(canonicalize_name(one.name)) for one in here}


def _component(name: str, own: Mapping[str, Distribution], packages: Mapping[str, md.Distribution]) -> dict[str, Any]:
    version = own[name].version if name in own else packages[name].version if name in packages else ""
    licence = {"expression": "Apache-2.0"} if name in own else _licence(packages.get(name))
    return {
        "type": "library",
        "bom-ref": name,
        "name": name,
        **({"version": version} if version else {}),
        "purl": f"pkg:pypi/{name}" + (f"@{version}" if version else ""),
        **({"licenses": [licence]} if licence else {}),
    }


def _licence(package: md.Distribution | None) -> dict[str, Any]:
    """Return the licence in a package's metadata: its SPDX expression, else a name; empty if it has neither."""
    if package is None:
        return {}
    expression = package.metadata.get_all("License-Expression")
    if expression:
        return {"expression": str(expression[0])}
    classifiers = map(str, package.metadata.get_all("Classifier") or [])
    named = [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]
    # Some packages have their whole licence in this field.
    field = [str(one) for one in package.metadata.get_all("License") or [] if len(str(one).splitlines()) == 1]
    found = [*named, *field]
    return {"license": {"name": found[0]}} if found else {}
