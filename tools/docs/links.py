"""Check of a built site: links and anchors exist, nothing loads from a network, and no code block is shown as text.

python -m tools.docs.links build/site
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {"script": "src", "img": "src", "link": "href", "iframe": "src", "source": "src"}
"""Attribute with an address that a browser fetches by itself, by element."""
VERBATIM = ("code", "pre", "script", "style")


@dataclass
class Page(HTMLParser):
    """Parser of one HTML page; it collects links, loaded files, anchors and code fences that appear as text."""

    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    fences: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Record an element's link, loaded file and id."""
        values = dict(attrs)
        self._verbatim += tag in VERBATIM
        self.anchors.update(value for value in (values.get("id"), values.get("name")) if value)
        if tag == "a" and values.get("href"):
            self.links.append(str(values["href"]))
        elif tag in LOADED and values.get(LOADED[tag]) and values.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(str(values[LOADED[tag]]))

    def handle_endtag(self, tag: str) -> None:
        """Note that an element with verbatim text has ended."""
        self._verbatim -= tag in VERBATIM

    def handle_data(self, data: str) -> None:
        """Record a code fence (```) that was left in the text."""
        if not self._verbatim and "```" in data:
            self.fences.append(data[data.index("```") :].split("\n")[0])


def faults(site: Path) -> list[str]:
    """Return one sentence for each dead link, each file loaded from a network, and each code block shown as text."""
    pages = {path: _page(path) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name = path.relative_to(site)
        found += [f"{name} loads {one} from a network" for one in page.loaded if _is_away(one)]
        found += [f"{name} shows {one!r} as text: Markdown did not recognise the block" for one in page.fences]
        here = [one for one in (*page.links, *page.loaded) if not _is_away(one)]
        found += [f"{name} links to {one}: {why}" for one in here if (why := _wrong(path, one, pages, site))]
    return list(dict.fromkeys(found))


def main() -> int:
    """Print the faults of a built site; return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site
    found = faults(site)
    links = sum(len(_page(path).links) for path in site.rglob("*.html"))
    print("\n".join([*found, f"{len(list(site.rglob('*.html')))} pages, {links} links, {len(found)} faults"]))
    return 1 if found else 0


def _page(path: Path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _is_away(link: str) -> bool:
    return bool(urlsplit(link).scheme or urlsplit(link).netloc)


def _wrong(path: Path, link: str, pages: dict[Path, Page], site: Path) -> str:
    parts = urlsplit(link)
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
    target = target / "index.html" if target.is_dir() else target
    if not target.is_file() or not target.is_relative_to(site.resolve()):
        return "no such file"
    page = pages.get(site / target.relative_to(site.resolve()))
    anchor = unquote(parts.fragment)
    return f"no anchor {anchor}" if anchor and page and anchor not in page.anchors else ""


if __name__ == "__main__":
    sys.exit(main())
