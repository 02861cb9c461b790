"""python requirements.py DISTRIBUTION: print what it requires here, but for what text needs not or `make` installs."""

from __future__ import annotations

import importlib.metadata as md
import sys

from packaging.requirements import Requirement

LEFT_OUT = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}


def main() -> None:
    """Print one requirement a line."""
    for line in md.requires(sys.argv[1]) or ():
        one = Requirement(line)
        if one.name.lower() not in LEFT_OUT and (one.marker is None or one.marker.evaluate({"extra": ""})):
            one.marker = None
            print(one)


if __name__ == "__main__":
    main()
