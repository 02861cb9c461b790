"""Folder of compiled kernels. Each entry is a folder with a kernel's machine code, its metadata and their checksums.

    <root>/triton-3.9.0/sm_90/<kernel>-<key>/{<kernel>.cubin, <kernel>.json, sums.json}

An entry is written next to its place and renamed, so concurrent processes see a whole entry or none. A damaged entry
counts as absent, and the next `put` replaces it. No torch, and Triton only for its version.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import triton

from .source import KernelSource

SUMS = "sums.json"
KEPT = (".cubin", ".json")
"""Suffixes of the files that a launch needs. Triton also produces three intermediate forms, which are left out."""
LOCK = ".compiling"


@dataclass(frozen=True)
class Entry:
    """A stored kernel.

    Attributes:
        files: path of each file by its name in Triton's metadata group.
        num_bytes: size of the files.
        shipped: the entry comes from a read-only layer.
    """

    files: Mapping[str, str]
    num_bytes: int
    shipped: bool


class Store:
    """Compiled kernels in a folder, and in further read-only folders.

    Args:
        root: folder of the entries; created by the first `put`.
        shipped: read-only folders of the same layout, searched after `root`.
    """

    def __init__(self, root: Path, shipped: tuple[Path, ...] = ()) -> None:
        self.root, self.shipped = root, shipped

    @property
    def host_code(self) -> Path:
        """Folder of the host code that Triton compiles (`host_code`)."""
        return self.root / f"triton-{triton.__version__}" / "host"

    def find(self, source: KernelSource) -> Entry | None:
        """Return the entry of a kernel, or None if it is absent or damaged everywhere."""
        for layer in (self.root, *self.shipped):
            files = _read(_folder(layer, source))
            if files:
                size = sum(os.path.getsize(path) for path in files.values())
                return Entry(files, size, layer is not self.root)
        return None

    def put(self, source: KernelSource, files: Mapping[str, str]) -> None:
        """Copy a compiled kernel into the store.

        Args:
            files: Triton's metadata group: path of each file, by name. Only the suffixes in KEPT are copied.

        Raises:
            OSError: the folder cannot be written.
        """
        folder = _folder(self.root, source)
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = folder.with_name(f".{folder.name}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        temporary.mkdir()
        try:
            sums = {}
            for name, path in files.items():
                if name.endswith(KEPT):
                    content = Path(path).read_bytes()
                    sums[name] = _digest(content)
                    (temporary / name).write_bytes(content)
            (temporary / SUMS).write_text(json.dumps(sums), encoding="utf-8")
            if folder.exists() and _read(folder) is None:
                # Another process may replace the damaged entry at the same time; then either copy is right.
                shutil.rmtree(folder, ignore_errors=True)
            with contextlib.suppress(FileExistsError, OSError):
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Hold the store's lock, so that ranks of one machine compile each kernel once. A read-only store has none."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            file = (self.root / LOCK).open("w")
        except OSError:
            yield
            return
        with file:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def num_bytes(self) -> int:
        """Return the bytes of all files below the folder."""
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())


def _folder(root: Path, source: KernelSource) -> Path:
    return root / f"triton-{triton.__version__}" / f"sm_{source.arch}" / f"{source.name}-{source.key[:32]}"


def _read(folder: Path) -> dict[str, str] | None:
    """Return the files of an entry by name; None unless every file is there and has its checksum."""
    try:
        sums: dict[str, str] = json.loads((folder / SUMS).read_text(encoding="utf-8"))
        whole = all(_digest((folder / name).read_bytes()) == digest for name, digest in sums.items())
    except (OSError, ValueError, AttributeError):
        return None
    return {name: str(folder / name) for name in sums} if whole and sums else None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
