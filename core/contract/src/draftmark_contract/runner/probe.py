"""Loads a backend in a child process, so that a crash of the plugin is harmless, and prints facts for the journal.

    python -m draftmark_contract.runner.probe NAME TIER [DEVICE]

The last output line is JSON. It is ``{"error": …}`` if the backend does not load, ``{"unusable": …}`` if the device
tier cannot run here, else ``{"judged": …, "run": …}`` for the journal, with the digests of the parsed files, and with
whether the backend serves layers with recurrent state.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from draftmark.errors import DraftmarkError

from ..check import Tier
from .code_digest import parsed_files
from .fresh import fresh
from .identity import identity_of, parts_of
from .limits import LIMIT_S
from .machine import machine_of
from .session import NO_DEVICE, ContractSession
from .source import source_of

STALLED_S = 1.5 * LIMIT_S
"""Seconds before the process is killed, for a plugin that hangs in native code and so escapes `LIMIT_S`."""


def probe(name: str, tier: str, device: str) -> dict[str, Any]:
    """Return the facts that a journal records about a backend, from a child process that loads it."""
    command = [sys.executable, "-m", __name__, name, tier, *([device] if device else [])]
    try:
        done = subprocess.run(
            command, env=fresh(), capture_output=True, text=True, errors="replace", timeout=STALLED_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"loading {name!r} took longer than {STALLED_S:g} s"}
    try:
        found: dict[str, Any] = json.loads(done.stdout.rpartition("\n")[2])
    except json.JSONDecodeError:
        said = done.stderr.strip().rpartition("\n")[2]
        return {
            "error": f"loading {name!r} ended the process with code {done.returncode}" + (f": {said}" if said else "")
        }
    return found


def _begin(name: str, tier: str, device: str = "") -> dict[str, Any]:
    session = ContractSession(name, tier, device or None)
    backend = session.backend
    if backend is None:
        return {"error": session.error}
    where = session.device if session.tier is Tier.DEVICE else ""
    if session.tier is Tier.DEVICE:
        if not where:
            return {"unusable": NO_DEVICE}
        try:
            backend.require_runtime(where)
        except DraftmarkError as error:
            return {"unusable": str(error)}
    judged = {"backend": name, "identity": identity_of(backend)}
    run = {**machine_of(name, where), "source": source_of(parts_of(backend))}
    return {"judged": judged, "run": run, "parsed": parsed_files(), "states": bool(backend.info.recurrences)}


if __name__ == "__main__":
    print("\n" + json.dumps(_begin(*sys.argv[1:])), end="")
