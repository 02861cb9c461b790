"""Finds the commit of the tested code, and proves that the code matches this commit.

In a git repository, the digest of the files is compared with the digest of the same files at the commit. Changed
comments do not count, and every changed line of code is found. A machine without the history uses the commit in
DRAFTMARK_COMMIT, and the record marks it as unverified. Later `verified` compares the recorded digests with the
history.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .code_digest import counts
from .identity import PLUGIN, Part

COMMIT_VARIABLE = "DRAFTMARK_COMMIT"
CLEAN, UNVERIFIED = "clean", "unverified"


def source_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Return the commit, the state of the tree, and the path of each part in the repository.

    ``tree`` is ``"clean"`` (proved here), ``"unverified"`` (no history that contains the commit), or
    ``"changed: core, plugin"``. DRAFTMARK_COMMIT takes precedence over HEAD.
    """
    given = os.environ.get(COMMIT_VARIABLE, "")
    parts = list(parts)
    repository = _repository(parts)
    commit = given or (_git(repository, "rev-parse", "HEAD") if repository else "")
    if repository is None or not _git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}"):
        return {"commit": commit, "tree": UNVERIFIED, "paths": {}}
    paths = {part.name: _within(part.root, repository) for part in parts}
    known = {part.name: part for part in parts if paths[part.name] is not None}
    changed = [name for name, part in known.items() if part.digest() != _at(repository, commit, part, paths[name])]
    tree = f"changed: {', '.join(sorted(changed))}" if changed else CLEAN
    return {"commit": commit, "tree": tree, "paths": {name: paths[name] for name in sorted(known)}}


def verified(record: Mapping[str, Any], parts: Iterable[Part], repository: Path) -> bool:
    """Return True if the recorded digests are equal to the digests of the files at the recorded commit.

    Args:
        record: record of a verdict.
        parts: parts of the installed code.
        repository: a folder in the repository with the history.
    """
    source, identity = record.get("source", {}), record.get("identity", {})
    commit, paths = source.get("commit", ""), source.get("paths", {})
    if not commit or not _git(repository, "rev-parse", "--verify", f"{commit}^{{commit}}"):
        return False
    here = {part.name: part for part in parts}
    repository = Path(_git(repository, "rev-parse", "--show-toplevel"))
    paths = paths or {name: _within(part.root, repository) for name, part in here.items()}
    if PLUGIN not in identity or not set(identity) <= set(here) or not all(paths.get(name) for name in identity):
        return False
    return all(_at(repository, commit, here[name], paths[name]) == identity[name] for name in identity)


def _repository(parts: list[Part]) -> Path | None:
    """Return the top folder of the repository that contains the plugin's files, or None."""
    plugin = next((part for part in parts if part.name == PLUGIN), None)
    if plugin is None or not plugin.root.is_dir() or not _git(plugin.root, "ls-files", "--", *_names(plugin)):
        return None
    return Path(_git(plugin.root, "rev-parse", "--show-toplevel"))


def _names(part: Part) -> list[str]:
    return [path.relative_to(part.root).as_posix() for path in part.paths]


def _within(root: Path, repository: Path) -> str | None:
    try:
        return root.resolve().relative_to(repository.resolve()).as_posix()
    except ValueError:
        return None


def _at(repository: Path, commit: str, part: Part, path: str | None) -> str:
    """Return the digest of the part at a commit. Symbolic links and submodules are skipped."""
    listed = _git(repository, "ls-tree", "-r", "-z", f"{commit}:{path}") if path is not None else ""
    rows = [row.partition("\t") for row in listed.split("\0") if row.startswith("100")]
    blobs = {name: about.split()[2] for about, _, name in rows if part.has(name) and counts(name)}
    return part.digest(zip(blobs, _contents(repository, list(blobs.values())), strict=True))


def _contents(repository: Path, blobs: list[str]) -> list[bytes]:
    """Return the contents of the git blobs with these ids."""
    command = ["git", "-C", str(repository), "cat-file", "--batch"]
    done = subprocess.run(command, input="\n".join(blobs).encode() + b"\n", capture_output=True, check=True)
    found, rest = [], done.stdout
    for _ in blobs:
        head, _, rest = rest.partition(b"\n")
        size = int(head.split()[2])
        found.append(rest[:size])
        rest = rest[size + 1 :]
    return found


def _git(folder: Path, *arguments: str) -> str:
    """Return git's output, or "" if git is absent or fails."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
