"""SGLang, imported once in a process; where no device is, with stand-ins for the packages that need one."""

from __future__ import annotations

from functools import cache


@cache
def ready(device: str) -> None:
    """Let SGLang's modules be imported one by one."""
    from .absent import stand_in

    if device == "cpu":
        stand_in()


@cache
def import_sglang(device: str) -> None:
    """Everything that a scheduler's process needs."""
    import logging

    ready(device)
    logging.disable(logging.WARNING)
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
