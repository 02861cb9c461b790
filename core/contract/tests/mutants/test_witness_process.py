"""Tests that the mutants OB…, OC… and OJ… are wrong, and that the backends that they change are right."""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from draftmark import Mode
from draftmark.loaded import LoadedBackend

from . import catalog
from .mutant import Mutant
from .witness_world import CLOSE, Forward, geometry, pools, requests, right

assert catalog.MUTANTS, "the catalog installs the plugins of OJ1 … OJ4"
SHAPE = geometry()


def forward() -> Forward:
    return Forward(SHAPE, Mode.DECODE, requests(SHAPE, (9, 21)), pools(SHAPE, 40))


def run(loaded: LoadedBackend) -> float:
    return forward().run(loaded.open(SHAPE, "cpu", guard=False))


def keeps_the_collector(loaded: LoadedBackend) -> bool:
    """The garbage collector runs after a forward as before it."""
    was = gc.isenabled()
    try:
        run(loaded)
        return gc.isenabled() is was
    finally:
        gc.enable()


def keeps_pythons_generator(loaded: LoadedBackend) -> bool:
    """Python's own random generator stands where it stood."""
    before = random.getstate()
    run(loaded)
    same = random.getstate() == before
    random.setstate(before)
    return same


def lets_its_arena_go(loaded: LoadedBackend) -> bool:
    """The arena is freed with the backend."""
    arena = loaded.allocate(SHAPE, "cpu", guard=False)
    backend = loaded.bind(SHAPE, arena)
    forward().run(backend)
    gone = weakref.ref(arena)
    del arena, backend
    gc.collect()
    return gone() is None


def keeps_numpys_errors(loaded: LoadedBackend) -> bool:
    """NumPy treats floating-point errors as before."""
    with np.errstate(all="warn"):
        run(loaded)
        return np.geterr() == dict.fromkeys(("divide", "over", "under", "invalid"), "warn")


def keeps_the_environment(loaded: LoadedBackend) -> bool:
    """The process has the environment variables that it had."""
    with patch.dict(os.environ):
        before = dict(os.environ)
        run(loaded)
        return dict(os.environ) == before


def ignores_old_memory(loaded: LoadedBackend) -> bool:
    """The result is right whatever the buffers contain before the first forward."""
    found = []
    for byte in (0x00, 0x01, 0x2A, 0x7F, 0x80, 0xFF):
        arena = loaded.allocate(SHAPE, "cpu", guard=False)
        for spec in arena.specs:
            if not spec.zeros:
                arena[spec.name].view(-1).view(torch.uint8).fill_(byte)
        found.append(forward().run(loaded.bind(SHAPE, arena)))
    return max(found) < CLOSE


def plans_on_another_thread(loaded: LoadedBackend) -> bool:
    """A plan that another thread made serves the forward."""
    backend, one = loaded.open(SHAPE, "cpu", guard=False), forward()
    planner = threading.Thread(target=backend.plan, args=(one.batch,))
    planner.start()
    planner.join()
    backend.write_metadata(one.batch)
    one.attend(backend)
    return one.error() < CLOSE


def survives_nan_without_guards(loaded: LoadedBackend) -> bool:
    """NaN in unwritten slots of a last page reaches no output, with guard words and without."""
    found = []
    for guard in (True, False):
        one = forward()
        for request in one.live:
            end = request.prefix + request.rows
            for cache in (one.caches[0].k, one.caches[0].v):
                cache[request.pages[end // SHAPE.attention.page_size], end % SHAPE.attention.page_size :] = float("nan")
        backend = loaded.open(SHAPE, "cpu", guard=guard)
        backend.plan(one.batch)
        backend.write_metadata(one.batch)
        one.attend(backend)
        for cache in one.caches:  # unwritten slots are NaN before and after
            cache.k.nan_to_num_(7.0)
            cache.v.nan_to_num_(7.0)
        one.before = [(k.nan_to_num(7.0), v.nan_to_num(7.0)) for k, v in one.before]
        found.append(one.error())
    return max(found) < CLOSE


def answers(loaded: LoadedBackend) -> str:
    return repr((loaded.buffers(SHAPE), loaded.requirements(SHAPE)))


def sizes_whatever_the_environment(loaded: LoadedBackend) -> bool:
    """Buffers and requirements do not depend on environment variables."""
    with patch.dict(os.environ, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="0"):
        before = answers(loaded)
    with patch.dict(os.environ, OMP_NUM_THREADS="12", CUDA_VISIBLE_DEVICES="0,1"):
        return answers(loaded) == before


def sizes_without_torch(loaded: LoadedBackend) -> bool:
    """Buffers are the same before torch is imported."""
    shape = geometry((4, 2), reqs=3, nodes=1, extend=3)
    before = repr(loaded.buffers(shape))
    kept = sys.modules.pop("torch")
    try:
        return repr(loaded.buffers(shape)) == before
    finally:
        sys.modules["torch"] = kept


def sizes_whatever_a_cache_holds(loaded: LoadedBackend) -> bool:
    """Buffers do not depend on files of the user."""
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, XDG_CACHE_HOME=folder):
        before = answers(loaded)
        Path(folder, "draftmark_qj4.json").write_text("{}")
        return answers(loaded) == before


WITNESSES: dict[str, Callable[[LoadedBackend], bool]] = {
    "OB1": keeps_the_collector,
    "OB2": keeps_pythons_generator,
    "OB3": lets_its_arena_go,
    "OB4": keeps_numpys_errors,
    "OB5": keeps_the_environment,
    "OC1": ignores_old_memory,
    "OC2": plans_on_another_thread,
    "OC3": survives_nan_without_guards,
    "OJ1": sizes_whatever_the_environment,
    "OJ2": sizes_without_torch,
    "OJ3": sizes_whatever_the_environment,
    "OJ4": sizes_whatever_a_cache_holds,
}
"""For each mutant a statement that holds for the backend without the defect."""


@pytest.mark.parametrize("mutant", catalog.named(WITNESSES), ids=lambda one: one.id)
def test_statement_about_the_process_fails_only_on_the_mutant(mutant: Mutant) -> None:
    """The statement holds for the right backend and not for the mutant."""
    witness = WITNESSES[mutant.id]
    for layout in mutant.layouts:
        assert witness(right(layout))
        assert not witness(mutant.build(layout))
