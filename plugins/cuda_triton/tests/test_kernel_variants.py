"""Each kernel package has one compiled and one interpreted copy, also with concurrent imports, and both run."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, BrokenBarrierError

import pytest

from draftmark_cuda_triton import kernel_variants, kernels

PACKAGE = """
from contextlib import suppress
from {here} import BARRIER, IMPORTED, BrokenBarrierError

IMPORTED.append(__name__)
with suppress(BrokenBarrierError):
    BARRIER.wait(timeout=1)
"""
IMPORTED: list[str] = []
BARRIER = Barrier(2)
"""Barrier for two threads that import the package at once; a single thread continues after the timeout."""
__all__ = ["BARRIER", "IMPORTED", "BrokenBarrierError"]


@pytest.mark.parametrize("before", [None, "0"])
def test_concurrent_threads_import_a_variant_once(tmp_path, monkeypatch, before):
    """Two threads that load a variant at the same time receive one module, and TRITON_INTERPRET is restored."""
    outer = f"outer_{before}"
    inner = tmp_path / outer / "inner"
    inner.mkdir(parents=True)
    (tmp_path / outer / "__init__.py").touch()
    (inner / "__init__.py").write_text(PACKAGE.format(here=__name__), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(kernel_variants.INTERPRET_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(kernel_variants.INTERPRET_VARIABLE, before)
    IMPORTED.clear()
    BARRIER.reset()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: kernel_variants.load_variant(f"{outer}.inner", True), range(2)))
    assert found[0] is found[1]
    assert [f"{outer}.interpreted_inner"] == IMPORTED
    assert os.environ.get(kernel_variants.INTERPRET_VARIABLE) == before


WITHOUT = """
import sys

sys.modules["draftmark_triton_interpreter"] = None  # as if it were not installed
import torch
from draftmark_cuda_triton.shared import write_kv

k, v = torch.randn(2, 3, 2, 16)
cache = torch.zeros(2, 4, 4, 2, 16)
slots = torch.tensor([5, -1, 9])
write_kv(k, v, cache[0], cache[1], None, None, slots)
for rows, pages in zip((k, v), cache):
    found = pages.view(16, 2, 16)
    assert torch.equal(found[[5, 9]], rows[[0, 2]]) and found.count_nonzero() == rows[[0, 2]].count_nonzero()
kinds = {type(one).__name__ for one in vars(sys.modules["draftmark_cuda_triton.interpreted_kernels"].kv_write).values()}
assert "InterpretedFunction" in kinds and "InterpretedKernel" not in kinds
"""


@pytest.mark.long
def test_triton_interprets_where_the_faster_package_is_absent():
    """Without `draftmark_triton_interpreter`, Triton's own interpreter runs the kernels, with equal results."""
    found = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr


def loop_bounds(source: str) -> list[ast.expr]:
    """Return the arguments of each `range` of a loop."""
    loops = [node.iter for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For)]
    calls = [call for call in loops if isinstance(call, ast.Call) and ast.unparse(call.func) in ("range", "tl.range")]
    return [argument for call in calls for argument in call.args]


def is_plain(argument: ast.expr) -> bool:
    """Check whether the interpreter of Triton 3.6 evaluates an argument to an int with every NumPy."""
    if isinstance(argument, ast.IfExp):
        return is_plain(argument.body) and is_plain(argument.orelse)
    if isinstance(argument, ast.Call):
        return ast.unparse(argument.func) == "bound"
    return isinstance(argument, ast.Constant) or (isinstance(argument, ast.Name) and argument.id.isupper())


@pytest.mark.parametrize("path", sorted(Path(kernels.__path__[0]).glob("*.py")), ids=lambda path: path.stem)
def test_loop_bounds_are_ints_in_the_interpreter(path: Path) -> None:
    # Triton 3.6 makes a one-element vector of each assigned number. NumPy 2.4 does not convert it to an int.
    assert [ast.unparse(one) for one in loop_bounds(path.read_text()) if not is_plain(one)] == []
