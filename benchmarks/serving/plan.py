"""Plan of a run: workloads, and waves of servers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .servers import Server
from .workload import Workload


@dataclass(frozen=True)
class Plan:
    """Workloads and servers of a run, as read from a JSON file.

    The file has ``engine``, ``workloads`` (fields of `Workload`), ``servers`` (fields that all servers share) and
    ``waves`` (lists of the fields of each `Server`). The servers of a wave alternate after each workload. Those with
    ``restart`` start one after another; the others start together, and their start times are not compared.

    Attributes:
        start_s, pass_s: seconds that a start and a pass are expected to take; none begins with less time left.
        paired: servers with ``restart`` start together too, both times. Their start times are compared, because each
            server has the same company.
    """

    engine: str
    workloads: tuple[Workload, ...]
    waves: tuple[tuple[Server, ...], ...]
    start_s: float
    pass_s: float
    paired: bool = False


def read(path: Path) -> Plan:
    """Read a plan."""
    given: dict[str, Any] = json.loads(path.read_text())
    shared = {"engine": given["engine"], **given.get("servers", {})}
    waves = tuple(tuple(Server(**shared | one) for one in wave) for wave in given["waves"])
    workloads = (
        Workload(**{name: tuple(one) if isinstance(one, list) else one for name, one in fields.items()})
        for fields in given["workloads"]
    )
    times = given.get("start_s", 60.0), given.get("pass_s", 12.0)
    return Plan(given["engine"], tuple(workloads), waves, *times, given.get("paired", False))
