"""A package of kernels has one copy of a kind, whoever asks first."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import pytest

from draftmark_cuda_triton import kernel_variants

PACKAGE = """
from contextlib import suppress
from {here} import MET, MEETING, BrokenBarrierError

MET.append(__name__)
with suppress(BrokenBarrierError):
    MEETING.wait(timeout=1)
"""
MET: list[str] = []
MEETING = Barrier(2)
"""Where two threads that import the package at once meet; one alone goes on when its time is up."""
__all__ = ["MEETING", "MET", "BrokenBarrierError"]


@pytest.mark.parametrize("before", [None, "0"])
def test_concurrent_threads_import_a_variant_once(tmp_path, monkeypatch, before):
    """And what says how kernels run is afterwards what it was."""
    outer = f"outer_{before}"
    inner = tmp_path / outer / "inner"
    inner.mkdir(parents=True)
    (tmp_path / outer / "__init__.py").touch()
    (inner / "__init__.py").write_text(PACKAGE.format(here=__name__), encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv(kernel_variants.INTERPRET_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(kernel_variants.INTERPRET_VARIABLE, before)
    MET.clear()
    MEETING.reset()
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: kernel_variants.load_variant(f"{outer}.inner", True), range(2)))
    assert found[0] is found[1]
    assert [f"{outer}.interpreted_inner"] == MET
    assert os.environ.get(kernel_variants.INTERPRET_VARIABLE) == before
