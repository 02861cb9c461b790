"""A process with one running scheduler: SGLang's settings are a process's own, so each setup has one.

On a CPU it is forked from the judging process once that has imported SGLang; where CUDA may be in use already, which no
fork outlives, it is spawned, and imports SGLang itself. It serves questions one after the other.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.item import NotAsked, NotServed

from . import questions
from .driver import Driver, Patch, as_it_is
from .importing import import_sglang
from .setups import SETUPS

LIMIT_S = 300
LOST = "CUDA error"
"""In the words of a fault behind which a process can use the device no more."""
REFUSES = "support"
"""In the words of an assertion by which SGLang refuses an input ("doesn't support"), rather than finds itself wrong."""


class Station:
    """The process of one setup, begun at the first question.

    Args:
        patch: see `driver.Patch`; on a CPU it must be there before the fork, elsewhere be one that pickle takes.
    """

    def __init__(self, setup: str, backend: str, device: str, patch: Patch = as_it_is) -> None:
        self.setup, self._backend, self._device, self._patch = setup, backend, device, patch
        self._process: Any = None
        self._ends: Any = None

    def ask(self, question: str, *given: Any) -> None:
        """Put a function of `questions` to the station.

        Raises:
            ContractViolation: the answer is wrong. NotServed, NotAsked: see there.
            RuntimeError: it raised anything else, or its process ended.
        """
        if self._process is None:
            self._begin()
        self._ends.send((question, given))
        if not self._ends.poll(LIMIT_S):
            self.end()
            raise RuntimeError(f"no answer within {LIMIT_S} s")
        try:
            kind, told = self._ends.recv()
        except EOFError:
            self.end()
            raise RuntimeError("SGLang's process ended in this item") from None
        if kind == "wrong":
            what, details = told
            details["bug"] = details.pop("known from")
            raise ContractViolation(what, **details)
        if kind in ("not served", "not asked"):
            raise {"not served": NotServed, "not asked": NotAsked}[kind](told)
        if kind == "raised":
            if LOST in told:
                self.end()  # its CUDA context answers nothing any more: the next question gets a process of its own
            raise RuntimeError(told)

    def end(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()
            self._process = None

    def _begin(self) -> None:
        forks = self._device == "cpu"
        if forks:
            import_sglang(self._device)
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._ends, theirs = context.Pipe()
        given = (theirs, self.setup, self._backend, self._device, self._patch)
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()


def _serve(ends: Any, name: str, backend: str, device: str, patch: Patch) -> None:
    from .scheduler import scheduler_for

    import_sglang(device)
    driver: Driver | str
    try:
        with tempfile.TemporaryDirectory() as folder:
            driver = Driver(scheduler_for(SETUPS[name], backend, device, Path(folder)), SETUPS[name], patch, device)
    except (ValueError, AssertionError, NotImplementedError) as error:
        driver = f"SGLang's server does not start so: {type(error).__name__}: {' '.join(str(error).split())}"
    except BaseException:
        ends.send(("raised", traceback.format_exc(limit=-3)))
        os._exit(1)
    while True:
        question, given = ends.recv()
        ends.send(_answer(driver, question, given))


def _answer(driver: Driver | str, question: str, given: tuple[Any, ...]) -> tuple[str, Any]:
    if isinstance(driver, str):
        return "not served", driver
    try:
        getattr(questions, question)(driver, *given)
        driver.settle()
    except ContractViolation as error:
        return "wrong", (error.what, dict(error.details))
    except NotServed as error:
        return "not served", str(error)
    except NotAsked as error:
        return "not asked", str(error)
    except BaseException as error:
        if isinstance(error, AssertionError) and REFUSES in str(error):
            return "not served", f"SGLang refuses it: {' '.join(str(error).split())}"
        return "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    return "right", None
