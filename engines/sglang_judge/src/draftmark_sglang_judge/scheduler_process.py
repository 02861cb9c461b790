"""Process with one running SGLang scheduler, which runs the judge's questions (checks) one at a time.

SGLang's settings are global in a process, so each setup has its own process. On a CPU the process is forked after the
judge has imported SGLang. For a GPU it is spawned and imports SGLang itself, because CUDA does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path
from typing import Any

from draftmark_contract.check import ContractViolation, Refused, Unjudged
from draftmark_contract.judge.devices import device_of

from . import questions
from .driver import Driver, Patch, unpatched
from .importing import import_sglang
from .setups import SETUPS

LIMIT_S = 300
DEVICE_LOST = "CUDA error"
"""Text of errors after which a process can no longer use the device."""
REJECTION = "support"
"""Text of assertions that reject an input ("doesn't support"). Other assertions are faults of SGLang."""


class SchedulerProcess:
    """Starts a process for one setup (server arguments) at the first question, and runs questions (checks) in it.

    Args:
        setup: name of the setup.
        backend: the judge's name of the attention backend.
        device: torch device.
        patch: function from SGLang's backend class to the class that is judged. On a CPU it must exist before the
            fork; on a GPU it must be picklable.
        outside: True for a backend from outside of SGLang.
    """

    def __init__(self, setup: str, backend: str, device: str, patch: Patch = unpatched, outside: bool = False) -> None:
        self.setup, self._backend, self._device, self._patch = setup, backend, device, patch
        self._outside = outside
        self._process: Any = None
        self._connection: Any = None

    def ask(self, question: str, *arguments: Any) -> None:
        """Run a function of `questions` in the process.

        Raises:
            ContractViolation: the result is wrong.
            Refused, Unjudged: the backend rejects the input, or the question cannot run here.
            RuntimeError: the function raised another error, its process ended, or it exceeded the time limit.
        """
        if self._process is None:
            self._start()
        self._connection.send((question, arguments))
        if not self._connection.poll(LIMIT_S):
            self.end()
            raise RuntimeError(f"no result within {LIMIT_S} s; SGLang's process was terminated")
        try:
            kind, content = self._connection.recv()
        except EOFError:
            self.end()
            raise RuntimeError("SGLang's process ended during this item") from None
        if kind == "wrong":
            what, details = content
            details["bug"] = details.pop("known from")
            raise ContractViolation(what, **details)
        if kind in ("not served", "not asked"):
            raise {"not served": Refused, "not asked": Unjudged}[kind](content)
        if kind == "raised":
            if DEVICE_LOST in content:
                self.end()  # After a CUDA error the process cannot use the GPU; the next call starts a new one.
            raise RuntimeError(content)

    def end(self) -> None:
        """Terminate the process."""
        if self._process is not None:
            self._process.terminate()
            self._process.join()
            self._process = None

    def _start(self) -> None:
        forks = device_of(self._device).host
        if forks:
            import_sglang(self._device)
        context: Any = multiprocessing.get_context("fork" if forks else "spawn")
        self._connection, child_end = context.Pipe()
        arguments = (child_end, self.setup, self._backend, self._device, self._patch, self._outside)
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        child_end.close()


def _serve(connection: Any, name: str, backend: str, device: str, patch: Patch, outside: bool = False) -> None:
    from .outside import register
    from .scheduler import scheduler_for

    import_sglang(device)
    driver: Driver | str
    try:
        known = register(backend, device) if outside else ""
        with tempfile.TemporaryDirectory() as folder:
            scheduler = scheduler_for(SETUPS[name], backend, device, Path(folder), known)
        driver = Driver(scheduler, SETUPS[name], patch, device, backend, known)
    except (ValueError, AssertionError, NotImplementedError) as error:
        driver = f"SGLang's server does not start: {type(error).__name__}: {' '.join(str(error).split())}"
    except BaseException:
        connection.send(("raised", traceback.format_exc(limit=-3)))
        os._exit(1)
    while True:
        question, arguments = connection.recv()
        connection.send(_answer(driver, question, arguments))


def _answer(driver: Driver | str, question: str, arguments: tuple[Any, ...]) -> tuple[str, Any]:
    if isinstance(driver, str):
        return "not served", driver
    try:
        getattr(questions, question)(driver, *arguments)
        driver.synchronize()
    except ContractViolation as error:
        return "wrong", (error.what, dict(error.details))
    except Refused as error:
        return "not served", str(error)
    except Unjudged as error:
        return "not asked", str(error)
    except BaseException as error:
        if isinstance(error, AssertionError) and REJECTION in str(error):
            return "not served", f"SGLang rejects the input: {' '.join(str(error).split())}"
        return "raised", f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
    return "right", None
