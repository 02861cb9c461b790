"""Opens a plugin's backend as a subject: loads it, lists its items, and runs them on the CPU or on a device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property

from draftmark.devices import synchronize
from draftmark.errors import DraftmarkError
from draftmark.kernels import cache_folder
from draftmark.loaded import LoadedBackend
from draftmark.registry import load

from ..backend_under_test import BackendUnderTest
from ..cases.histories import SEED
from ..check import Tier, all_checks, unavailable
from ..profiles import OF_STATE
from .identity import parts_of
from .item import Item, all_items, run_item
from .known import KnownFailure, known_failures
from .limits import LIMIT_S, TimeLimit, time_limit
from .machine import machine_of
from .outcome import Result
from .resources import release_memory
from .subject import Kind, Listed, Opened, Opening

NO_DEVICE = "torch sees no accelerator here; run --tier host on the CPU, or name a device with --device"
NO_STATE = "it is for layers with recurrent state, but {} lists none in BackendInfo.recurrences"


THREADS = "OMP_NUM_THREADS"
"""Environment variable that limits the threads of torch, and of NumPy's OpenBLAS or MKL."""
HYPOTHESIS = "HYPOTHESIS_STORAGE_DIRECTORY"
"""Environment variable: folder for files of hypothesis."""
PREPARE = "DRAFTMARK_PREPARE"
"""Environment variable: with 0, opening a backend does not compile kernels that no batch needs yet."""


def environment(tier: Tier = Tier.HOST, workers: int = 1, seed: int | None = None) -> dict[str, str]:
    """Return the environment of worker processes, with the number of threads of each.

    The caller's OMP_NUM_THREADS takes precedence. Otherwise workers of the device tier share the cores. Workers of the
    host tier get one thread, as torch does in the suite: tensors are tiny, and NumPy's threads in Triton's interpreter
    only waste processor time.
    """
    threads = max(1, (os.cpu_count() or 1) // workers) if tier is Tier.DEVICE else 1
    found = {
        THREADS: os.environ.get(THREADS) or str(threads),
        # An item opens a geometry for a few batches, so it compiles only the kernels that it launches.
        PREPARE: os.environ.get(PREPARE) or "0",
        # Without it hypothesis writes a folder into the user's current folder.
        HYPOTHESIS: os.environ.get(HYPOTHESIS) or str(cache_folder() / "hypothesis"),
    }
    return found if seed is None else {**found, SEED: str(seed)}


def opening(
    name: str,
    tier: str = Tier.HOST,
    device: str | None = None,
    items: Sequence[str] = (),
    limit: float = LIMIT_S,
    variables: Mapping[str, str] | None = None,
) -> Opening:
    """Return the opening of a plugin's backend.

    Args:
        name: name of the backend.
        tier: highest tier to run; ignored with `items`, which set their own highest tier.
        device: torch device of the device tier; None for the backend's own.
        items: ids of the only items that will run; () for all.
        limit: seconds for one item.
        variables: environment of the worker process; None for that of `environment`.
    """
    arguments = {"name": name, "tier": str(tier), "device": device or "", "items": list(items), "limit": limit}
    return Opening(__name__, arguments, environment(Tier(tier)) if variables is None else variables)


def open_subject(name: str, tier: str, device: str, items: Sequence[str], limit: float) -> PluginSubject:
    """Load a backend, and check that the tier can run here.

    Raises:
        DraftmarkError: the backend does not load, or the tier cannot run here.
    """
    try:
        with time_limit(limit):
            backend = load(name)
    except DraftmarkError as error:
        raise DraftmarkError(f"it does not load: {error}") from error
    except (TimeLimit, SystemExit) as error:
        raise DraftmarkError(f"it does not load: loading ended with {type(error).__name__}: {error}") from error
    highest = _highest(items) if items else Tier(tier)
    if highest is not Tier.SIZING and importlib.util.find_spec("torch") is None:
        remedy = "pip install 'draftmark-contract[torch]', or run --tier sizing"
        raise DraftmarkError(f"the {highest} tier needs torch, which is not installed: {remedy}")
    if highest is Tier.DEVICE:
        device = device or _device_of(backend)
        try:
            if not device:
                raise DraftmarkError(NO_DEVICE)
            backend.require_runtime(device)
        except DraftmarkError as error:
            raise DraftmarkError(f"the device tier cannot run here: {error}") from error
    return PluginSubject(backend, device if highest is Tier.DEVICE else "", limit)


class PluginSubject:
    """Holds a loaded backend and the device of its device tier.

    Args:
        backend: the loaded plugin.
        device: torch device; "" if no item of the device tier will run.
        limit: seconds for one item.
    """

    def __init__(self, backend: LoadedBackend, device: str = "", limit: float = LIMIT_S) -> None:
        self.backend, self.device, self._limit = backend, device, limit
        self._checks = {check.name: check for check in all_checks()}

    @property
    def opened(self) -> Opened:
        """Facts about the backend, and about the device if the device tier will run."""
        backend, tier = self.backend, Tier.DEVICE if self.device else Tier.HOST
        subject = BackendUnderTest(backend, self.device or "cpu", tier)
        return Opened(
            name=backend.name,
            kind=Kind.PLUGIN,
            command=subject.command,
            machine=machine_of(backend.name, self.device),
            parts=parts_of(backend),
            info=asdict(backend.info),
            known=[asdict(one) for one in self.known],
            minor=subject.minor,
            kernels=backend.info.host_kernels,
            unavailable=unavailable(),
        )

    @cached_property
    def known(self) -> list[KnownFailure]:
        """Declared failures of the plugin; none if its file is damaged, which an item reports."""
        try:
            return known_failures(self.backend)
        except ValueError:
            return []

    @property
    def left_out(self) -> Mapping[str, str]:
        """Checks without an item: those of layers with recurrent state, if the plugin serves none."""
        if self.backend.info.recurrences:
            return {}
        reason = NO_STATE.format(self.backend.name)
        return {
            name: reason
            for name, check in self._checks.items()
            if all(Item(check, c).needs & OF_STATE for c in check.cases())
        }

    def items(self) -> Sequence[Listed]:
        """Return the items of every tier."""
        return [Listed.of(one) for one in all_items(backend=self.backend)]

    def run(self, item: str) -> Result:
        """Run one item on the CPU, or on the device if it belongs to the device tier."""
        name, _, case = item.removesuffix("]").partition("[")
        check = self._checks[name]
        one = Item(check, next(one for one in check.cases() if one.id == case))
        device = self.device if one.tier is Tier.DEVICE else "cpu"
        result = run_item(one, BackendUnderTest(self.backend, device, one.tier), self.known, self._limit)
        if one.tier is Tier.DEVICE:
            release_memory(device)
        return result

    def lost(self) -> bool:
        """Return True if the device rejects all further work of this process."""
        try:
            if self.device:
                synchronize(self.device)
        except RuntimeError:
            return True
        return False


def _highest(items: Sequence[str]) -> Tier:
    """Return the highest tier of these items. Items that do not exist are reported when the items are listed."""
    names = {one.partition("[")[0] for one in items}
    return max((one.tier for one in all_checks() if one.name in names), key=tuple(Tier).index, default=Tier.SIZING)


def _device_of(backend: LoadedBackend) -> str:
    """Return the backend's device type, or torch's accelerator if the backend runs anywhere; "" if there is none."""
    if backend.info.device != "any":
        return backend.info.device
    import torch

    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else ""
