"""Import of SGLang, once in a process. On a CPU, stand-ins replace packages that need a device."""

from __future__ import annotations

from functools import cache

from draftmark_contract.judge.devices import device_of


@cache
def prepare_imports(device: str) -> None:
    """Install stubs for absent device packages if the device is a CPU, so that SGLang's modules can be imported."""
    from .absent import stand_in

    if device_of(device).host:
        stand_in()


@cache
def import_sglang(device: str) -> None:
    """Import SGLang's scheduler and EAGLE worker, once in a process."""
    import logging

    prepare_imports(device)
    logging.disable(logging.WARNING)
    import sglang.srt.managers.scheduler
    import sglang.srt.speculative.eagle_worker_v2  # noqa: F401
