"""Collector of the site: docs/, generated pages, and every repository file that they link to, in one folder.

    python -m tools.docs.staging build/docs

The site is read without a network and without a clone. So a link into the repository becomes a link to a page of the
site that shows the file. A link to a record of benchmarks/results becomes a link to the results page that shows it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path

from . import api, commands, matrix, notebooks, results
from .kills import DOCS, ROOT, kills_page, mutation_page, page_of_specification

LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
FILE = re.compile(r"^(```\w+) file=(\S+)$", re.MULTILINE)
"""File name of a code block. It becomes a title on the site, because Markdown would show the line as text."""
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SHOWN = {".py": "python", ".toml": "toml", ".sh": "bash", ".cpp": "cpp", ".yml": "yaml", ".txt": "text", "": "text"}
"""Suffixes of files that become a page, and the language of their code block. Other files are copied."""
MOVED = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"
MADE: dict[str, Callable[[], str]] = {
    "cli.md": commands.page,
    "compatibility.md": matrix.page,
    **api.PAGES,
    **results.MADE,
    "contract-kills.md": kills_page,
    "contract-mutation.md": mutation_page,
}
"""Pages that only the site has, and the function that writes each."""


class Stage:
    """Collects the site's files in one folder; `place` copies a repository file there once and returns its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.places: dict[Path, str] = {}

    def place(self, source: Path) -> str:
        """Return the path of a repository file on the site, relative to the site's root.

        Raises:
            ValueError: the repository has no such file.
        """
        source = source / "README.md" if (source / "README.md").is_file() else source
        if source not in self.places:
            self.places[source] = self._named(source)
            self._stage(source, self.places[source])
        return self.places[source]

    def write(self, name: str, text: str, source: Path) -> None:
        """Write a page. Links in `text` are relative to `source`; they become links to pages of the site."""
        target = self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(FILE.sub(r'\1 title="\2"', self._linked(text, source, name)), encoding="utf-8")

    def _named(self, source: Path) -> str:
        if source.is_relative_to(DOCS):
            return source.relative_to(DOCS).as_posix()
        path = source.relative_to(ROOT).as_posix()
        if source.is_dir():
            return f"source/{path}/index.md"
        return MOVED.get(path, f"source/{path}.md" if source.suffix in SHOWN else f"source/{path}")

    def _stage(self, source: Path, name: str) -> None:
        path = source.relative_to(ROOT).as_posix()
        if source.is_dir():
            inside = "\n".join(f"* `{one.name}`" for one in sorted(source.iterdir()) if one.name != "__pycache__")
            self.write(name, f"{UNSEARCHED}# {path}\n\n{inside}\n", source)
        elif source.suffix == ".md":
            hidden = UNSEARCHED if name.startswith("source/") else ""
            self.write(name, hidden + source.read_text(encoding="utf-8"), source)
        elif not source.is_file():
            raise ValueError(f"a page of the site links to {path}, which the repository does not have")
        elif name.endswith(".md"):
            text = source.read_text(encoding="utf-8")
            block = f"`````{SHOWN[source.suffix]}\n{text.rstrip()}\n`````\n"
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(f"{UNSEARCHED}# {path}\n\n{block}", encoding="utf-8")
        else:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, self.folder / name)

    def _linked(self, text: str, source: Path, name: str) -> str:
        def replace(match: re.Match[str]) -> str:
            target = match[2]
            if "://" in target or target.startswith("mailto:") or (self._is_made(target) and source.parent == DOCS):
                return match[0]
            linked = Path(os.path.normpath(source.parent / target))
            shown = results.page_of(linked) if name not in MADE and linked.is_file() else ""
            place, _, anchor = shown.partition("#")
            there = os.path.relpath(place or self.place(linked), Path(name).parent)
            after = f"#{anchor})" if anchor else match[3]
            return f"{match[1]}{Path(there).as_posix()}{after}"

        pieces, at = [], 0
        for fence in FENCE.finditer(text):  # brackets in a code block are not links
            pieces += [LINK.sub(replace, text[at : fence.start()]), fence[0]]
            at = fence.end()
        return "".join([*pieces, LINK.sub(replace, text[at:])])

    def _is_made(self, target: str) -> bool:
        return target in MADE or target in MOVED.values()


def stage(folder: Path) -> None:
    """Delete and refill the folder, and write ``folder.yml``, the configuration of mkdocs for these pages."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    site = Stage(folder)
    for path in sorted(DOCS.rglob("*")):
        if path.is_file() and path.suffix in (".md", ".svg", ".js", ".css", ".png"):
            site.place(path)
    for name in MOVED:
        site.place(ROOT / name)
    for path in sorted((DOCS / "notebooks").glob("*.ipynb")):
        site.write(f"notebooks/{path.stem}.md", notebooks.page(path), path)
    for name, page in MADE.items():
        site.write(name, page(), DOCS / name)
    settings = {
        "INHERIT": os.path.relpath(Path(__file__).with_name("mkdocs.yml"), folder.parent),
        "docs_dir": folder.name,
        "site_dir": "site",
        "nav": navigation(folder),
    }
    folder.with_suffix(".yml").write_text(json.dumps(settings, indent=2), encoding="utf-8")  # a JSON file is valid YAML


def navigation(folder: Path) -> list[object]:
    """Return the menu of menu.toml, limited to pages that exist, plus the notebooks."""
    text = Path(__file__).with_name("menu.toml").read_text(encoding="utf-8")
    menu: dict[str, dict[str, str]] = tomllib.loads(text.replace("specification-{version}.md", page_of_specification()))
    books = {_title(one): f"notebooks/{one.name}" for one in sorted((folder / "notebooks").glob("*.md"))}
    parts = list(menu.items())
    if books:
        parts.insert(list(menu).index("Specification"), ("Notebooks", books))
    return [{part: [{t: page} for t, page in pages.items() if (folder / page).exists()]} for part, pages in parts]


def _title(page: Path) -> str:
    return next(line[2:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    stage(parser.parse_args().folder)
