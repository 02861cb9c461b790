"""Builder of a release in one folder: ``python -m tools.release --out dist``. See docs/releasing.md.

It stops at the first fault with one sentence and exit code 1. It uploads nothing.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from . import wheel
from .bill import bill, check, installed
from .distributions import ROOT, core_version, distributions, faults
from .notes import notes
from .publisher import PLACEHOLDER, urls
from .sums import write_sums
from .trial import tool, trial


def main() -> int:
    """Build, check and install every distribution; return 1 at the first fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; its content is removed")
    parser.add_argument("--sample", type=int, default=0, help="cases of each check of the sizing tier; 0 for all")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv", help="environment that the SBOM lists")
    parser.add_argument(
        "--repository", default=PLACEHOLDER, help="https URL of the repository, in every wheel's metadata"
    )
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            urls(given.repository)
            _release(given.out.resolve(), Path(scratch), given.sample, given.environment.resolve(), given.repository)
    except (RuntimeError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _release(out: Path, scratch: Path, sample: int, environment: Path, repository: str) -> None:
    every = distributions()
    _stop([fault for one in every for fault in faults(one)])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for one in every:
        built = wheel.build(one, scratch / "sources", out, repository)
        _say(f"{one.name} {one.version}: {', '.join(path.name for path in built)}")
    wheels = sorted(out.glob("*.whl"))
    tool("-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    tool("-m", "check_wheel_contents", *map(str, wheels))
    _stop([fault for path in wheels for fault in wheel.faults(path)])
    _say(f"twine check, check-wheel-contents and our own checks pass: {len(wheels)} wheels and their sdists")
    for one in every:
        _say(trial(one, out, scratch / "environments" / one.name, sample))
    packages = installed(environment)
    for one in every:
        text = bill(one, every, packages)
        check(text)
        (out / f"{one.name}.cdx.json").write_text(text, encoding="utf-8")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (out / "NOTES.md").write_text(notes(changelog, repository), encoding="utf-8")
    write_sums(out)
    order = ", ".join(one.name for one in every)
    if repository == PLACEHOLDER:
        _say(f"draftmark {core_version()} has placeholder URLs; to publish it, run make release REPOSITORY=https://…")
    else:
        _say(f"draftmark {core_version()} can be published, in this order: {order}")


def _stop(found: list[str]) -> None:
    if found:
        raise RuntimeError("\n".join(found))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
