"""Digests of every kernel that the tests of compilation compile, to show that a change leaves the compiled code equal.

    python -m plugins.cuda_triton.tools.kernel_digests run before.json [pytest arguments]
    python -m plugins.cuda_triton.tools.kernel_digests compare before.json after.json

`run` compiles with the installed Triton and needs no GPU. Its table has one row for each test: the kernels that the
test compiled, each with digests of its PTX and of its SASS. Names, comments, paths and line numbers are not digested.
`compare` pairs the tests in their order, since names may have changed, and exits with 1 when any digest differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import triton
from triton.compiler import CompiledKernel

TESTS = [
    str(Path(__file__).resolve().parents[1] / "tests" / f"test_{name}.py")
    for name in ("compiles", "machine_code", "barrier_order")
]
CUOBJDUMP = Path(triton.backends.__path__[0]) / "nvidia" / "bin" / "cuobjdump"
PTX_COMMENT = re.compile(r"//.*|/\*.*?\*/")
PTX_DEBUG = re.compile(r"\s*\.(?:loc|file)\b")
SASS_LINE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/ .*|^\s*/\* 0x[0-9a-f]{16} \*/")


def digest(lines: list[str]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of the lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def ptx_digest(ptx: str, name: str) -> str:
    """Return the digest of PTX without comments, debug sections, line numbers and the kernel's own name."""
    code = ptx.split(".section", 1)[0]
    code = re.sub(rf"\b{re.escape(name)}(?=\b|_param)", "KERNEL", code)
    lines = [PTX_COMMENT.sub("", line).rstrip() for line in code.splitlines() if not PTX_DEBUG.match(line)]
    return digest([line for line in lines if line])


def sass_digest(cubin: bytes) -> str | None:
    """Return the digest of the instructions and their encodings; None if Triton has no disassembler."""
    if not CUOBJDUMP.exists():
        return None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([CUOBJDUMP, "-sass", file.name], check=True, capture_output=True, text=True).stdout
    lines = [line for line in text.splitlines() if SASS_LINE.match(line)]
    assert lines, "cuobjdump printed no instruction"
    return digest(lines)


class Recorder:
    """pytest plugin that computes the digests of the kernels that each test compiles.

    Attributes:
        table: test id → a list of kernels, each with its name, architecture and digests.
    """

    def __init__(self) -> None:
        self.table: dict[str, list[dict[str, Any]]] = {}
        self._compiled: list[CompiledKernel] = []
        self._digests: dict[str, tuple[str, str | None]] = {}
        create = CompiledKernel.__init__

        def create_and_keep(kernel: CompiledKernel, *args: Any, **options: Any) -> None:
            create(kernel, *args, **options)
            self._compiled.append(kernel)

        CompiledKernel.__init__ = create_and_keep

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Store the digests of the kernels that were compiled while a test ran."""
        self._compiled.clear()
        result = yield
        self.table[item.nodeid.partition("::")[2]] = [self._row(kernel) for kernel in self._compiled]
        self._compiled.clear()
        return result

    def _row(self, kernel: CompiledKernel) -> dict[str, Any]:
        if kernel.hash not in self._digests:
            self._digests[kernel.hash] = (ptx_digest(kernel.asm["ptx"], kernel.name), sass_digest(kernel.asm["cubin"]))
        ptx, sass = self._digests[kernel.hash]
        return {"kernel": kernel.name, "arch": kernel.metadata.target.arch, "ptx": ptx, "sass": sass}


def run(out: Path, arguments: list[str]) -> int:
    """Compile every case and write the table of digests as JSON; return pytest's exit code.

    Args:
        arguments: further arguments of pytest.
    """
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    recorder = Recorder()
    code = pytest.main(["-q", "-p", "no:cacheprovider", *TESTS, *arguments], plugins=[recorder])
    out.write_text(json.dumps(recorder.table, indent=1) + "\n")
    print(f"{sum(map(len, recorder.table.values()))} kernels of {len(recorder.table)} tests -> {out}")
    return int(code)


def compare(before: Path, after: Path) -> int:
    """Print the kernels that differ and the number of equal kernels; return 1 if any differs, else 0."""
    tables = [json.loads(path.read_text()) for path in (before, after)]
    if len(tables[0]) != len(tables[1]):
        print(f"{len(tables[0])} tests before, {len(tables[1])} after; compile the same tests")
        return 1
    equal = different = 0
    for (old, olds), (new, news) in zip(*(table.items() for table in tables), strict=True):
        if len(olds) != len(news):
            print(f"{old} -> {new}: {len(olds)} kernels before, {len(news)} after")
            different += 1
        for one, other in zip(olds, news, strict=False):
            same = all(one[field] == other[field] for field in ("arch", "ptx", "sass"))
            equal, different = equal + same, different + (not same)
            if not same:
                print(f"{old}: {one['kernel']} differs from {other['kernel']} of {new}")
    codes = {(one["arch"], one["ptx"], one["sass"]) for rows in tables[0].values() for one in rows}
    print(f"{equal} kernels equal ({len(codes)} distinct), {different} different, {len(tables[0])} tests")
    return int(different > 0)


def main() -> int:
    """Run the command `run` or `compare`."""
    parser = argparse.ArgumentParser(prog="kernel_digests", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="compile every case and write the table")
    running.add_argument("out", type=Path)
    comparing = commands.add_parser("compare", help="compare two tables")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    args, rest = parser.parse_known_args()
    return run(args.out, rest) if args.command == "run" else compare(args.before, args.after)


if __name__ == "__main__":
    sys.exit(main())
