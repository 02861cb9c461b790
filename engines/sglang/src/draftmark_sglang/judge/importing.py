"""Import of SGLang, once in a process. On a CPU, stand-ins replace packages that need a device."""

from __future__ import annotations

from functools import cache


@cache
def prepare_imports(device: str) -> None:
    """Prepare the process for imports of SGLang's modules."""
    from .absent import stand_in

    if device == "cpu":
        stand_in()


@cache
def import_sglang(device: str) -> None:
    """Import every module that a scheduler's process needs."""
    import logging

    prepare_imports(device)
    logging.disable(logging.WARNING)
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
