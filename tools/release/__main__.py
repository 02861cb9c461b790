"""Builder of a release in one folder: ``python -m tools.release --out dist``. See docs/releasing.md.

It stops at the first fault with one sentence and exit code 1. It uploads nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path

from . import wheel
from .distributions import ROOT, core_version, distributions, faults
from .notes import notes
from .trial import tool, trial


def main() -> int:
    """Build, check and install every distribution; return 1 at the first fault."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files; its content is removed")
    parser.add_argument("--sample", type=int, default=0, help="cases of each check of the sizing tier; 0 for all")
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv", help="environment that the SBOM lists")
    given = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _release(given.out.resolve(), Path(scratch), given.sample, given.environment.resolve())
    except (RuntimeError, ValueError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def _release(out: Path, scratch: Path, sample: int, environment: Path) -> None:
    every = distributions()
    _stop([fault for one in every for fault in faults(one)])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    for one in every:
        built = wheel.build(one, scratch / "sources", out)
        _say(f"{one.name} {one.version}: {', '.join(path.name for path in built)}")
    wheels = sorted(out.glob("*.whl"))
    tool("-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir())))
    tool("-m", "check_wheel_contents", *map(str, wheels))
    _stop([fault for path in wheels for fault in wheel.faults(path)])
    _say(f"twine check, check-wheel-contents and our own checks pass: {len(wheels)} wheels and their sdists")
    for one in every:
        _say(trial(one, out, scratch / "environments" / one.name, sample))
    bill = str(out / "sbom.cdx.json")
    tool("-m", "cyclonedx_py", "environment", str(environment / "bin" / "python"), "--output-file", bill)
    _strip_folders(out / "sbom.cdx.json")
    (out / "NOTES.md").write_text(notes((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")), encoding="utf-8")
    _sums(out)
    _say(f"draftmark {core_version()} can be published, in this order: {', '.join(one.name for one in every)}")


def _strip_folders(bill: Path) -> None:
    """Remove this machine's folders from the SBOM entries of the repository's own packages; the entries stay."""
    content = json.loads(bill.read_text(encoding="utf-8"))
    for one in content["components"]:
        places = [place for place in one.pop("externalReferences", []) if not place["url"].startswith("file:")]
        one.update({"externalReferences": places} if places else {})
    bill.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _sums(out: Path) -> None:
    """Write SHA256SUMS of the built files, for `sha256sum --check`."""
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}" for path in sorted(out.iterdir())]
    (out / "SHA256SUMS").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _stop(found: list[str]) -> None:
    if found:
        raise RuntimeError("\n".join(found))


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
