"""Settings that an engine may give its process. A backend that sets one of them to a constant changes another one."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Setting = tuple[Callable[[], Any], Callable[[Any], object], tuple[Any, Any]]
"""Reader, writer, and the values in the two sets of settings."""


def _flag(owner: Any, name: str, values: tuple[Any, Any] = (True, False)) -> Setting:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value), values


SETTINGS: tuple[Setting, ...] = (
    (torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.bfloat16)),
    (torch.is_grad_enabled, lambda value: torch.set_grad_enabled(value), (True, False)),
    (torch.get_num_threads, torch.set_num_threads, (1, 2)),
    (torch.is_warn_always_enabled, torch.set_warn_always, (False, True)),
    _flag(torch.utils.deterministic, "fill_uninitialized_memory"),
    (lambda: _matmul_precision(), lambda value: _set_matmul_precision(*value), ((True, "tf32"), (False, "ieee"))),
    _flag(torch.backends.cudnn, "allow_tf32"),
    _flag(torch.backends.cudnn, "benchmark"),
    _flag(torch.backends.cudnn, "deterministic"),
)
"""The first set has the values of a plain process or of none, the second those of some engine."""


def _matmul_precision() -> tuple[bool, str]:
    """Return torch's old and new flag of TF32. The old one decides the new one, but not if that is ``"none"``."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cuda.matmul.fp32_precision


def _set_matmul_precision(old: bool, new: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = old
    if new != torch.backends.cuda.matmul.fp32_precision:
        torch.backends.cuda.matmul.fp32_precision = new


@contextmanager
def engine_settings(which: int) -> Iterator[None]:
    """Give this process set 0 or 1 of the settings and generators, and restore its own afterwards."""
    before = [(write, read()) for read, write, _ in SETTINGS]
    generators = torch.get_rng_state(), random.getstate()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if which else "default")
        try:
            for _, write, values in SETTINGS:
                write(values[which])
            torch.manual_seed(which)
            random.seed(which)
            yield
        finally:
            for write, value in before:
                write(value)
            torch.set_rng_state(generators[0])
            random.setstate(generators[1])
