"""Mutants that the checks of `supports` kill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from draftmark import BackendRefusal, Geometry, Mode

from ..designs.declared import CALLS
from ..mutant import Mutant, standalone

_ASKED: set[str] = set()


def _refuses(condition: Callable[[Geometry], Any], *reasons: str) -> dict[str, Any]:
    return {"supports": lambda g, found: [*found, *reasons] if condition(g) else found}


def _raises(hook: str, condition: Callable[[Geometry], Any], error: Exception) -> dict[str, Any]:
    def change(geometry: Geometry, found: Any) -> Any:
        if condition(geometry):
            raise error
        return found

    return {hook: change}


def _forgets(geometry: Geometry, reasons: list[str]) -> list[str]:
    """Refuse windows only on the first call for a geometry."""
    new = repr(geometry) not in _ASKED
    _ASKED.add(repr(geometry))
    return ["windows are not served by these kernels"] if new and geometry.attention.window_left >= 0 else reasons


def _windowed(geometry: Geometry) -> bool:
    return geometry.attention.window_left >= 0


def _refuses_late(geometry: Any, backend: Any) -> Any:
    if geometry.attention.window_left >= 0:
        raise BackendRefusal("late", ["windows are not served"])
    return backend


CLAIMS = {"layouts": ("reference",), "absent": "it serves only the five core modes"}


def _planned(geometry: Geometry, reasons: list[str]) -> list[str]:
    late = ["mode ragged_verify is not served: it is not written yet"]
    return late if Mode.RAGGED_VERIFY in geometry.modes else reasons


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
    Mutant("OJ1", "Sizes scratch by the threads of the process", "OMP_NUM_THREADS of another service",
           **standalone("blind_sizes:OJ1", "csr")),
    Mutant("OJ2", "Rounds buffers up only in a process that has torch", "draftmark size on a laptop",
           **standalone("blind_sizes:OJ2", "tutorial")),
    Mutant("OJ3", "Requires unique slots when CUDA_VISIBLE_DEVICES lists several GPUs", "a launcher's environment",
           **standalone("blind_sizes:OJ3", "reference")),
    Mutant("OJ4", "Doubles split buffers where a tuning file lies in the user's cache", "tuning tables in a cache",
           **standalone("blind_sizes:OJ4", "cuda_triton")),
    Mutant("T14", "Declares RAGGED_VERIFY and refuses every geometry with it", "a plan declared as a capability",
           hooks={"supports": _planned}, **CLAIMS),
    Mutant("V51", "Refuses in open_backend what supports accepts", "sglang#15664", {"open_backend": _refuses_late}),
    Mutant("W30", "Accepts a geometry in supports and raises in buffers", "sglang#15664",
           _raises("buffers", _windowed, RuntimeError("no windows"))),
    Mutant("W30b", "Accepts a geometry in supports and refuses it in buffers", "sglang#15664",
           _raises("buffers", _windowed, BackendRefusal("late", ["windows are not served here"]))),
    Mutant("W31", "Accepts a geometry in supports and raises in layouts", "sglang#15664",
           _raises("layouts", lambda g: g.draft.topk > 9, RuntimeError("topk"))),
    Mutant("W32", "Refuses the mandatory profile when padding exceeds max_num_reqs", "sglang#25124",
           _refuses(lambda g: g.max_reqs > g.limits.max_num_reqs, "captured sizes above max_num_reqs are not served")),
    Mutant("W32b", "Refuses the mandatory profile without captured sizes", "sglang#35932",
           _refuses(lambda g: not g.limits.capture_batch_sizes, "eager runs are not served: name a captured size")),
    Mutant("W33", "Gives a refusal reason of one word",
           "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "no")),
    Mutant("W34", "Gives an empty refusal reason", "sglang#32920", _refuses(lambda g: g.attention.page_size == 3, "")),
    Mutant("W35", "Gives a refusal reason that counts the calls", "sglang#31198",
           {"supports": lambda g, found: [f"windows are not served, call {next(CALLS)}"]
            if _windowed(g) else found}),
    Mutant("W36", "Refuses a geometry on the first call and accepts it on the second",
           "sglang#31198", {"supports": _forgets}),
    Mutant("W55", "Returns an object that is not a backend from open_backend",
           "sglang#30846", {"open_backend": lambda g, backend: object()}),
)  # fmt: skip
KILLER = {
    **dict.fromkeys(
        ("J01", "J02", "J03", "J04", "J05", "J06", "OJ1", "OJ2", "OJ3", "OJ4"), "supports.answers_alike_elsewhere"
    ),
    "T14": "supports.claims_are_served",
}
