"""Asks a backend's sizing hooks in another process, in another place than this one.

    python -m draftmark_contract.sizing.elsewhere NAME KIND ARCH SMS PLACE

The last output line is JSON: the answers, the environment variables that the process has read, and the message of an
error that refuses the value of one of them. No torch.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from draftmark.errors import BackendError
from draftmark.geometry import DeviceProfile
from draftmark.registry import available, load

from ..check import ContractViolation
from ..runner.fresh import fresh
from .answers import HOOKS, Answers, answers_of, questions

KEPT = ("PATH", "PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "SYSTEMROOT")
"""Environment variables that a Python process needs to start with the same packages."""


@dataclass(frozen=True)
class Place:
    """Describes how a process differs from this one.

    Attributes:
        where: clause for messages, e.g. ``"in a process with one processor"``.
        environment: variables to set.
        bare: True removes all other variables, except those that Python needs (`KEPT`).
        options: options of the interpreter, e.g. ``("-OO",)``.
        processors: number of processors that Python reports, with another host name and memory size; 0 for the real
            ones.
        imports: modules to import before the backend. ``"*"`` loads all other installed backends.
        threads: threads of torch, which must be among the imports; 0 leaves them.
        backwards: True asks the last geometry first, on a thread, with the hooks in reverse order.
        hooks: hooks to ask, without supports; None for all.
    """

    where: str
    environment: Mapping[str, str] | None = None
    bare: bool = False
    options: tuple[str, ...] = ()
    processors: int = 0
    imports: tuple[str, ...] = ()
    threads: int = 0
    backwards: bool = False
    hooks: tuple[str, ...] | None = None


class RefusedVariables(Exception):
    """A backend has refused the values of environment variables, in an error that names each of them."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(", ".join(names))
        self.names = tuple(names)


class NoAnswers(ContractViolation):
    """A process ended without answers."""


def answers_in(place: Place, name: str, device: DeviceProfile) -> tuple[list[Answers], list[str]]:
    """Return an installed backend's answers to `questions` in a new process, and the variables that it has read.

    Raises:
        RefusedVariables: the backend raises a `BackendError` that names variables of the place which it has read.
        NoAnswers: the process ended without an answer.
    """
    command = [sys.executable, *place.options, "-m", __name__, name, device.kind, str(device.arch), str(device.num_sms)]
    environment = fresh(place.environment)
    if place.bare:
        environment = {key: value for key, value in environment.items() if key in (*KEPT, *(place.environment or ()))}
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [*command, json.dumps(asdict(place))],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    try:
        found: dict[str, Any] = json.loads(done.stdout.rpartition("\n")[2])
    except json.JSONDecodeError:
        raise NoAnswers(
            f"the sizing hooks do not answer {place.where}",
            got=done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}",
            expected="the answers that they give here",
            remedy="decide by the geometry only",
        ) from None
    if found["refused"]:
        raise RefusedVariables(found["refused"])
    return found["answers"], found["read"]


def installed(name: str, plugin: object) -> bool:
    """Return True if another process that loads backend `name` gets the plugin that is loaded here."""
    return any(row.name == name for row in available()) and type(load(name).plugin) is type(plugin)


class _Recorded(type(os.environ)):  # type: ignore[misc]
    """Records the names of the variables that are read of ``os.environ``."""

    read: set[str] = set()  # noqa: RUF012  one record for the process

    def __getitem__(self, key: str) -> str:
        _Recorded.read.add(key)
        return super().__getitem__(key)  # type: ignore[no-any-return]


def _be_in(place: Mapping[str, Any]) -> None:
    """Give this process the properties of a place that no environment variable gives."""
    os.environ.__class__ = _Recorded
    if place["processors"]:
        count, real, node = int(place["processors"]), os.sysconf, f"draftmark-{place['processors']}"
        os.cpu_count = lambda: count
        os.sched_getaffinity = lambda pid: set(range(count))
        os.process_cpu_count = os.cpu_count  # type: ignore[attr-defined,unused-ignore]
        sizes: dict[str | int, int] = dict.fromkeys(
            ("SC_NPROCESSORS_ONLN", "SC_NPROCESSORS_CONF", "SC_PHYS_PAGES"), count
        )
        os.sysconf = lambda name: sizes.get(name) or real(name)
        system = os.uname()
        os.uname = lambda: os.uname_result((system.sysname, node, *system[2:]))
        socket.gethostname = lambda: node


def _import(modules: Sequence[str], name: str) -> None:
    """Import modules and load other backends first. Those that do not import here are left out."""
    others = [row.name for row in available() if row.name != name] if "*" in modules else []
    for one in [*(module for module in modules if module != "*"), *others]:
        try:
            load(one) if one in others else __import__(one)
        except Exception:  # Another package may fail in any way; only this backend's answers count.
            continue


def _main(name: str, kind: str, arch: str, sms: str, given: str) -> None:
    place = json.loads(given)
    _be_in(place)
    _import(place["imports"], name)
    if place["threads"]:
        sys.modules["torch"].set_num_threads(place["threads"])
    turn, found = -1 if place["backwards"] else 1, list[Answers]()
    hooks = HOOKS[::-1] if place["backwards"] else place["hooks"]

    refused = list[str]()

    def ask() -> None:
        device = DeviceProfile(kind, int(arch), int(sms))
        try:
            found.extend(answers_of(load(name), device, questions()[::turn], hooks)[::turn])
        except BackendError as error:
            words = set(re.findall(r"\w+", str(error)))
            refused.extend(words & _Recorded.read & set(place["environment"] or ()))
            if not refused:
                raise

    if place["backwards"]:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    else:
        ask()
    print("\n" + json.dumps({"answers": found, "read": sorted(_Recorded.read), "refused": sorted(refused)}), end="")


if __name__ == "__main__":
    _main(*sys.argv[1:])
