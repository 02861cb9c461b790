"""Mutants B01 … B07: they need the suite's process, its memory or its thread. See `standalone` for their code."""

from __future__ import annotations

from .mutant import Mutant, standalone

MUTANTS = (
    Mutant(
        "B01",
        "Keeps the widths of a plan in thread-local storage",
        "an engine that plans on a thread of its own and launches on another",
        **standalone("processes:B01", "csr"),
    ),
    Mutant(
        "B02",
        "Writes metadata only in the context in which it has planned",
        "context variables; executors and asyncio give each call another context",
        **standalone("processes:B02", "tutorial"),
    ),
    Mutant(
        "B03",
        "Adds its result to an output from which only NaN was removed",
        "split-KV partial sums in memory that a test fills with NaN and an allocator does not",
        **standalone("processes:B03", "csr"),
    ),
    Mutant(
        "B04",
        "Is exact only where a package of tests is loaded",
        "debug switches that depend on the presence of pytest",
        **standalone("processes:B04", "reference"),
    ),
    Mutant(
        "B05",
        "Imports the suite when it is opened",
        "a helper of the tests in the step path; an engine does not install the suite",
        **standalone("processes:B05", "tutorial"),
    ),
    Mutant(
        "B06",
        "Sets a signal handler during a plan, which only the main thread can",
        "compilers that shield themselves from Ctrl-C",
        **standalone("processes:B06", "csr"),
    ),
    Mutant(
        "B07",
        "Switches on cuDNN's benchmark when the first backend of a process is opened",
        "global switches at first use; a later look at the process finds no change",
        **standalone("processes:B07", "tutorial"),
    ),
)
KILLER = dict.fromkeys((one.id for one in MUTANTS), "black_box.gives_the_same_results")
