"""Check of links between the repository's Markdown files: linked files and headings must exist.

python -m tools.docs.relative_links
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from .kills import ROOT

LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)|<(?:a|img)\b[^>]*?\b(?:href|src)=\"([^\"]+)\"")
ANCHOR = re.compile(r"\b(?:id|name)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6} +(.*?)(?: +#+)?$", re.MULTILINE)
VERBATIM = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^ *(```+|~~~+).*?^ *\1 *$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return every Markdown file that is in git or is new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(path for path in (ROOT / name for name in set(names)) if path.is_file())


@cache
def anchors(text: str) -> set[str]:
    """Return the anchors of a page: GitHub's anchors of headings, and ids of HTML tags."""
    found: set[str] = set(ANCHOR.findall(text))
    for title in HEADING.findall(BLOCK.sub("", text)):
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", title)
        plain = re.sub(r"<[^>]*>|[`*]", "", plain)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        again = sum(one == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", one) is not None for one in found)
        found.add(f"{slug}-{again}" if slug in found else slug)
    return found


def faults(files: list[Path], root: Path = ROOT) -> list[str]:
    """Return one sentence for each link to a missing file or heading.

    Args:
        files: Markdown files to check.
        root: folder that contains every permitted target of a link.
    """
    found = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        for link in [one or other for one, other in LINK.findall(VERBATIM.sub("", text))]:
            why = "" if re.match(r"[a-z][a-z+.-]*:", link) else _fault(path, unquote(link), root)
            found += [f"{path.relative_to(root)} links to {link}: {why}"] if why else []
    return found


def _fault(path: Path, link: str, root: Path) -> str:
    name, _, anchor = link.partition("#")
    target = (path.parent / name).resolve() if name else path
    if not target.exists() or not target.is_relative_to(root.resolve()):
        return "the repository has no such file"
    if anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
        return f"the page has no heading #{anchor}"
    return ""


def main() -> int:
    """Print the faults of all pages; return 1 if there are any."""
    files = pages()
    found = faults(files)
    print("\n".join([*found, f"{len(files)} pages, {len(found)} dead links"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
