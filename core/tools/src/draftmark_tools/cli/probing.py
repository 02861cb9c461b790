"""Test of one backend in its own process: ``python -m draftmark_tools.cli.probing NAME REPORT``.

The report is a JSON file, rewritten after every stage. The parent process reads the last stage from it, even if the
plugin crashed, hung or ended the interpreter. Output of the plugin cannot damage the report.
"""

from __future__ import annotations

import importlib.metadata as md
import importlib.util
import json
import os
import sys
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from draftmark.errors import BackendHookError, BackendLoadError, DraftmarkError, LoadFailure
from draftmark.geometry import AttentionShape, DraftShape, Geometry, Limits
from draftmark.loaded import LoadedBackend
from draftmark.registry import load

from .rendering import printable


class Verdict(StrEnum):
    """State of a backend on this machine."""

    READY = "ready"
    """A sample geometry was opened on the device."""
    REFUSES = "refuses"
    """The backend loads, but does not serve the sample geometry."""
    ABSENT = "absent"
    """The backend loads, but its vendor packages or its device are absent."""
    BROKEN = "broken"
    """The backend cannot be loaded, raises, crashes, hangs, or ends the process."""


@dataclass
class Report:
    """Result of testing one backend; `stage` is the last stage that started."""

    backend: str
    stage: str = "starting"
    verdict: Verdict = Verdict.BROKEN
    reasons: list[str] = field(default_factory=list)
    torch: str = ""
    device: str = ""
    runtime: dict[str, str | None] = field(default_factory=dict)
    """Version of each vendor package by import name; None when it is absent."""
    finished: bool = False


class Probe:
    """Tests one backend in stages, in order, and writes the report to disk after each stage."""

    def __init__(self, name: str, path: Path) -> None:
        self.report = Report(name)
        self._path = path

    def run(self) -> None:
        """Run the stages until one fails."""
        try:
            self._stages()
        except BackendLoadError as error:
            absent = error.failure in (LoadFailure.RUNTIME_ABSENT, LoadFailure.DEVICE_ABSENT)
            self._end(Verdict.ABSENT if absent else Verdict.BROKEN, f"{error.cause}; {error.remedy}")
        except BackendHookError as error:
            self._end(Verdict.BROKEN, f"{error.hook}() {error.cause}; {error.remedy}")
        except DraftmarkError as error:
            self._end(Verdict.BROKEN, str(error))
        except Exception as error:
            self._end(Verdict.BROKEN, f"{self.report.stage} raised {type(error).__name__}: {error}")

    def _stages(self) -> None:
        self._enter("importing the plugin")
        backend = load(self.report.backend)
        self.report.runtime = {name: _version(name) for name in backend.info.runtime}
        self._enter("importing torch")
        self.report.torch = _torch_version(backend.name)
        self._enter("checking the device")
        device = "cpu" if backend.info.device == "any" else backend.info.device
        self.report.device = device
        backend.require_runtime(device)
        self.report.device = _device_name(device)
        self._enter("checking whether the backend serves a sample geometry")
        geometry = sample_geometry(device)
        if reasons := backend.supports(geometry):
            self._end(Verdict.REFUSES, *reasons)
            return
        self._enter(f"opening a sample geometry on {device}")
        _open(backend, geometry, device)
        self._end(Verdict.READY)

    def _enter(self, stage: str) -> None:
        self.report.stage = stage
        self._write()

    def _end(self, verdict: Verdict, *reasons: str) -> None:
        self.report.verdict, self.report.reasons = verdict, [printable(" ".join(reason.split())) for reason in reasons]
        self.report.finished = True
        self._write()

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self.report)), encoding="utf-8")
        os.replace(fresh, self._path)


def sample_geometry(device: str) -> Geometry:
    """Return a Llama-like layer in bfloat16 with drafts of 8 tokens, which every backend is expected to serve."""
    from draftmark.devices import device_profile

    shape = AttentionShape(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=128)
    limits = Limits(max_num_reqs=2, max_context_len=256, max_extend_tokens=64, capture_batch_sizes=(1, 2))
    return Geometry.create(shape, limits, DraftShape(topk=2, num_draft_tokens=8), device_profile(device))


def _open(backend: LoadedBackend, geometry: Geometry, device: str) -> None:
    import torch

    backend.open(geometry, device, guard=True)
    backend.graph_state(geometry, torch.device(device))


def _torch_version(backend: str) -> str:
    if importlib.util.find_spec("torch") is None:
        remedy = "pip install 'draftmark[torch]'"
        raise BackendLoadError(backend, LoadFailure.RUNTIME_ABSENT, "torch is not installed", remedy)
    try:
        import torch
    except Exception as error:  # the import of torch may raise any exception, e.g. from a device's torch plugin
        raise DraftmarkError(
            f"torch cannot be imported ({type(error).__name__}: {error}); reinstall it, "
            "or set TORCH_DEVICE_BACKEND_AUTOLOAD=0 if the torch plugin of a device causes the error"
        ) from error
    return str(torch.__version__)


def _device_name(device: str) -> str:
    import torch

    if device != "cuda":
        return device
    properties = torch.cuda.get_device_properties(0)
    return f"{properties.name}, sm_{properties.major}{properties.minor}"


def _version(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    owners = md.packages_distributions().get(module)
    return md.version(owners[0]) if owners else "present"


def main() -> None:
    """Run the probe with the arguments of this process: backend name and report path."""
    name, path = sys.argv[1:]
    Probe(name, Path(path)).run()


if __name__ == "__main__":
    main()
