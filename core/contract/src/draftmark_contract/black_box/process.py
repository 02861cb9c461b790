"""Starts the black box: a process that runs forwards on an installed backend and never imports the suite."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftmark.batch import ForwardBatch
from draftmark.geometry import Geometry, Mode

from ..backend_under_test import BackendUnderTest
from ..check import ContractViolation, Tier
from ..harness import process_state
from ..harness.tensors import CaseTensors
from ..runner.fresh import fresh

PROGRAM = Path(__file__).with_name("program.py")
Life = tuple[str, list[list[dict[str, Any]]]]
"""Description of a life, and for each forward of each geometry its buffers, output, and K and V after it."""


def given_of(batch: ForwardBatch, tensors: CaseTensors, rows: int) -> dict[str, Any]:
    """Return the inputs of one forward: its batch and the tensors that a layer receives."""
    cache = tensors.cache
    replayed = batch.mode not in (Mode.EXTEND, Mode.DRAFT)
    return {
        "batch": batch,
        **{name: getattr(tensors, name)[:rows] for name in ("q", "k", "v", "out")},
        "cache": (cache.k, cache.v, cache.k_scale, cache.v_scale, cache.sinks),
        "program": batch.mode.value if replayed else "",
    }


def run_black_box(
    subject: BackendUnderTest, worlds: Sequence[tuple[Geometry, list[dict[str, Any]]]]
) -> tuple[list[Life], dict[str, str]]:
    """Run forwards in a process of their own. Return its lives, and what the backend has changed of the process.

    Args:
        worlds: geometries, each with the inputs of its forwards (`given_of`).

    Raises:
        ContractViolation: the process ended without results.
    """
    given: dict[str, Any] = {
        "name": subject.backend.name,
        "device": subject.device,
        "kernels": subject.kernels,
        "worlds": [(subject.fit(geometry), forwards) for geometry, forwards in worlds],
    }
    with tempfile.TemporaryDirectory() as folder:
        inputs, results = Path(folder, "given.pt"), Path(folder, "results.pt")
        torch.save(given, inputs)
        command = [sys.executable, str(PROGRAM), str(inputs), str(results), str(process_state.__file__)]
        command += [subject.backend.name, *([subject.device] if subject.tier is Tier.DEVICE else [])]
        done = subprocess.run(
            command, env=fresh(), cwd=folder, capture_output=True, text=True, errors="replace", check=False
        )
        if done.returncode or not results.exists():
            raise ContractViolation(
                "the backend does not run in a process without the suite",
                batch=f"{sum(len(one) for _, one in worlds)} forwards, in a process of their own",
                got=done.stderr.strip()[-400:] or f"exit code {done.returncode}",
                expected="the results that it gives here",
                remedy="import nothing of draftmark_contract, and need no main thread, guard words or earlier call",
            )
        if done.stdout:
            raise ContractViolation("the backend printed", got=repr(done.stdout[:200]), remedy="use logging")
        found: dict[str, Any] = torch.load(results, weights_only=False)
    return found["lives"], found["changes"]
