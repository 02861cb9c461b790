"""Holds the state of one process that runs the suite: the backend, loaded once, and the selected items."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from draftmark.devices import import_device_type
from draftmark.errors import DraftmarkError
from draftmark.loaded import LoadedBackend
from draftmark.registry import load

from ..backend_under_test import BackendUnderTest
from ..check import Tier
from .explanation import again
from .item import Item, all_items, run_item
from .journal import Journal
from .judging import judge
from .known import KnownFailure, known_failures
from .limits import LIMIT_S, TimeLimit, time_limit
from .machine import machine_of
from .outcome import Outcome, Result
from .resources import release_memory
from .source import CLEAN
from .verdict import Verdict

DEVICE_LOST = 75
"""Exit code of a process with a device that accepts no more work; its parent continues with a new process."""
LOST = "after this item the device accepted no more work from this process"
NO_DEVICE = "torch sees no accelerator here; run --tier host on the CPU, or name a device with --device"


class ContractSession:
    """Holds the backend and the items of one run, and runs items.

    Args:
        name: name of the backend.
        tier: highest tier to run.
        device: torch device of the device tier; None for the backend's own.
        journal: file that keeps results; None to keep none.
        sample: maximum number of cases per check; 0 for all.
        only: ids of the items to run; () for all.
    """

    def __init__(
        self,
        name: str,
        tier: str,
        device: str | None,
        journal: Path | None = None,
        sample: int = 0,
        only: Sequence[str] = (),
    ) -> None:
        self.name = name
        self.tier = Tier(tier)
        self._sample, self._only = sample, only
        self.journal = Journal(journal) if journal else None
        self.ended = self.journal.ended() if self.journal else {}
        self._device = device
        self._backend: LoadedBackend | None = None
        self._known: list[KnownFailure] = []
        self._first: dict[str, str] = {}
        self.error = ""

    @cached_property
    def items(self) -> dict[str, Item]:
        """Selected items by id, in the suite's order."""
        if not self._only:
            return {item.id: item for item in all_items(self.tier.includes, self._sample, backend=self.backend)}
        names = {one.partition("[")[0] for one in self._only}
        found = all_items(names=names, backend=self.backend)
        return {item.id: item for item in found if item.id in self._only}

    @property
    def collected(self) -> list[str]:
        """Ids of the items for pytest to run: all selected items, or only the first if the backend does not load."""
        return list(self.items) if self.backend else list(self.items)[:1]

    @property
    def backend(self) -> LoadedBackend | None:
        """Loaded backend, or None if it cannot be loaded. `error` then has the reason."""
        if self._backend is None and not self.error:
            try:
                with time_limit(LIMIT_S):
                    self._backend = load(self.name)
                self._known = known_failures(self._backend)
            except (DraftmarkError, ValueError) as error:
                self.error = str(error)
            except (TimeLimit, SystemExit) as error:
                self.error = f"loading {self.name!r} ended with {type(error).__name__}: {error}"
        return self._backend

    @property
    def device(self) -> str:
        """Device for the items: the caller's, else the backend's device type, else torch's accelerator, else ""."""
        if self._device or self.backend is None:
            return self._device or ""
        if self.backend.info.device != "any":
            return self.backend.info.device
        import torch

        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found.type if found is not None else ""

    def run(self, item_id: str) -> Result:
        """Run one item, unless the journal already contains its result.

        An item can destroy its process's device context. After an illegal access every call fails, so no later item can
        be tested in this process. With a journal the process then exits with `DEVICE_LOST`.
        """
        if item_id in self.ended:
            return self.ended[item_id]
        item = self.items[item_id]
        self._note({"started": item_id})
        result = self._run(item)
        lost = (
            item.tier is Tier.DEVICE
            and result.outcome in (Outcome.FAILED, Outcome.DECLARED, Outcome.UPCOMING)
            and self._lost()
        )
        if lost:
            result = replace(result, message=f"{result.message}\n{LOST}")
        self._note(result.as_json())
        if item.tier is Tier.DEVICE and self.device and not lost:
            release_memory(self.device)
        if lost and self.journal:
            os._exit(DEVICE_LOST)
        return result

    def failure_text(self, result: Result) -> str:
        """Return a failed item's message: in full for a check's first failure in this process, else in two lines."""
        first = self._first.setdefault(result.check, result.item)
        if first == result.item:
            return result.message
        lines = result.message.splitlines()
        return "\n".join([f"as {first}: {lines[min(1, len(lines) - 1)]}", lines[-1]])

    def _run(self, item: Item) -> Result:
        backend = self.backend
        if backend is None:
            return Result(item.id, item.tier.value, Outcome.FAILED, f"the backend does not load: {self.error}")
        device = self.device if item.tier is Tier.DEVICE else "cpu"
        if not device:
            return Result(item.id, item.tier.value, Outcome.FAILED, NO_DEVICE)
        return run_item(item, BackendUnderTest(backend, device, item.tier), self._known)

    def _lost(self) -> bool:
        """Return True if the device rejects all further work of this process."""
        if not self.device:
            return False
        from draftmark.devices import synchronize

        try:
            synchronize(self.device)
        except RuntimeError:
            return True
        return False

    def _note(self, row: dict[str, Any]) -> None:
        if self.journal:
            self.journal.note(row)


def conclude(session: ContractSession, records: dict[str, dict[str, Any]], stopped: str = "") -> Verdict:
    """Return the verdict on the records of a run. An item that ended its process counts as failed.

    Args:
        session: session of the process that collected the records.
        records: results as JSON by item; the key ``died`` marks an item that ended its process.
        stopped: reason why the run gives no verdict, as a clause; "" for a run to its end.
    """
    results = []
    noted = session.journal.ended() if session.journal else {}
    for item_id, row in records.items():
        if "died" not in row:
            results.append(Result.from_json(row))
        elif item_id in noted:
            results.append(noted[item_id])
        elif item_id in session.items:
            tier = session.items[item_id].tier.value
            message = f"the process died: {row['died']}\n{again(f'draftmark contract {session.name}', item_id)}"
            results.append(Result(item_id, tier, Outcome.FAILED, message))
    if session.backend is None:
        return judge(session.name, None, [], f"it does not load: {session.error}")
    runs = session.journal.runs() if session.journal else []
    # With xdist this process opened no backend, so torch may not have the device type yet.
    if session.tier is Tier.DEVICE:
        import_device_type(session.name, session.backend.info)
    here = machine_of(session.name, session.device if session.tier is Tier.DEVICE else "")
    verdict = judge(session.name, session.backend, results, stopped, runs or [{**here, "items": len(results)}])
    return replace(verdict, source=_source(verdict, session.journal)) if session.journal else verdict


def _source(verdict: Verdict, journal: Journal) -> dict[str, Any]:
    """Return the source of the tested code, preferably one that a run of the journal verified as a clean tree."""
    if journal.judged.get("identity", verdict.identity) != verdict.identity:
        return {**verdict.source, "tree": "changed during the run"}
    proved = journal.source() if verdict.source["tree"] != CLEAN else None
    return proved or verdict.source
