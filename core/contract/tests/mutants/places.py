"""Mutants J01 … J06: sizes and requirements that depend on the process. See `standalone` for their code."""

from __future__ import annotations

from .mutant import Mutant, standalone

MUTANTS = (
    Mutant(
        "J01",
        "Returns its buffers in the order of a set of names, so two ranks allocate different arenas",
        "hash randomisation: addresses and digests differ between tensor-parallel ranks",
        **standalone("sizes:J01", "csr"),
    ),
    Mutant(
        "J02",
        "Needs unique slots on a machine with more than 64 processors",
        "os.cpu_count() in place of DeviceProfile.num_sms; the engine's host plans for another machine",
        **standalone("sizes:J02", "tutorial"),
    ),
    Mutant(
        "J03",
        "Needs unique slots if an environment variable is set",
        "switches of a vendor's library; a scheduler process without the worker's environment",
        **standalone("sizes:J03", "reference"),
    ),
    Mutant(
        "J04",
        "Needs unique slots once another vendor's plugin has been imported",
        "capability flags found in sys.modules; the order of imports decides",
        **standalone("sizes:J04", "csr"),
    ),
    Mutant(
        "J05",
        "Changes its refusals in an assert statement, which -O leaves out",
        "asserts with side effects; images that set PYTHONOPTIMIZE",
        **standalone("sizes:J05", "tutorial"),
    ),
    Mutant(
        "J06",
        "Keeps the requirements of the first geometry that the process asks about",
        "a module's cache without a key; a target and a draft model in either order",
        **standalone("sizes:J06", "csr"),
    ),
)
KILLER = dict.fromkeys((one.id for one in MUTANTS), "supports.answers_alike_elsewhere")
