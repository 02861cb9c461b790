"""`draftmark judge sglang:triton` can fail: backends derived from SGLang's own, each with one defect, are found wrong.

A station forks from this process, so that a defect reaches the running scheduler's process as a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark_contract.check import ContractViolation
from draftmark_contract.judge.item import NotServed
from draftmark_sglang.judge.batches import forward_batch
from draftmark_sglang.judge.items import NEAR
from draftmark_sglang.judge.requests import place
from draftmark_sglang.judge.setups import SETUPS, Scene, eager_scenes
from draftmark_sglang.judge.station import Station

Patch = Callable[[Any], Any]


@contextmanager
def _station(setup: str, patch: Patch = lambda kind: kind, backend: str = "triton") -> Iterator[Station]:
    station = Station(setup, backend, "cpu", patch)
    try:
        yield station
    finally:
        station.end()


def _sees_every_draft(kind: Any) -> Any:
    """A verification without its mask: sglang#32269."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        kind.init_forward_metadata(self, batch)
        self.forward_metadata.custom_mask = None

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


def _keeps_the_capture(kind: Any) -> Any:
    """A replay that leaves the index buffers as they were captured: sglang#26019."""

    def init_forward_metadata_out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            kind.init_forward_metadata_out_graph(self, batch, in_capture=True)

    return type(kind.__name__, (kind,), {"init_forward_metadata_out_graph": init_forward_metadata_out_graph})


def _moves_its_buffer(kind: Any) -> Any:
    """A replay that fills a new tensor, which no captured kernel reads: sglang#27664."""

    def init_forward_metadata_out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        if not in_capture:
            self.cuda_graph_kv_indices = torch.zeros_like(self.cuda_graph_kv_indices)
        kind.init_forward_metadata_out_graph(self, batch, in_capture=in_capture)

    return type(kind.__name__, (kind,), {"init_forward_metadata_out_graph": init_forward_metadata_out_graph})


def _stores_one_further(kind: Any) -> Any:
    """Rows stored in the next slot."""

    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, **named: Any) -> Any:
        batch.out_cache_loc = batch.out_cache_loc + 1
        return kind.forward_decode(self, q, k, v, layer, batch, **named)

    return type(kind.__name__, (kind,), {"forward_decode": forward_decode})


def _counts_one_too_few(kind: Any) -> Any:
    """Index buffers sized by a sum that stayed behind: sglang#26753."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        batch.seq_lens_sum -= 3
        kind.init_forward_metadata(self, batch)

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


@pytest.mark.parametrize("scene", eager_scenes(SETUPS["page1-tree"]), ids=lambda one: one.name)
def test_a_batch_lies_on_the_device(scene: Scene) -> None:
    """All of it but the lengths that SGLang's host knows; on a device that anybody has."""
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None)
    with torch.device("meta"):
        batch = forward_batch(place(scene, SETUPS["page1-tree"], 512), runner)
    parts = vars(batch.spec_info or SimpleNamespace()) | vars(batch)
    homes = {name: one.device.type for name, one in parts.items() if isinstance(one, torch.Tensor)}
    assert homes.pop("seq_lens_cpu") == "cpu" and set(homes.values()) == {"meta"}, homes


def test_sgl_own_is_right() -> None:
    """What the defects below are asked, SGLang's own Triton backend answers."""
    with _station("page16") as station:
        station.ask("stores", "decode")
        station.ask("replays", "decode", -1)
    with _station("page1-tree") as station:
        station.ask("rows", "verify-random")
        station.ask("wall", "verify", NEAR, False)


@pytest.mark.parametrize(
    ("setup", "patch", "question", "said"),
    [
        ("page1-tree", _sees_every_draft, ("rows", "verify-random"), "is not attention over the"),
        ("page16", _keeps_the_capture, ("replays", "decode", -1), "is not attention over the"),
        ("page16", _moves_its_buffer, ("replays", "decode", -1), "is not attention over the"),
        ("page16", _stores_one_further, ("stores", "decode"), "a slot that no row stores has changed|does not hold it"),
        ("page1-tree", _counts_one_too_few, ("wall", "verify", NEAR, False), "3 elements were written behind its end"),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else None,
)
def test_a_defect_is_found(setup: str, patch: Patch, question: tuple[Any, ...], said: str) -> None:
    """By the item that is about it."""
    with _station(setup, patch) as station, pytest.raises(ContractViolation, match=said):
        station.ask(*question)


def test_a_backend_without_graphs_is_not_asked_for_replays() -> None:
    """It is not right, and not wrong."""
    with _station("page16", backend="torch_native") as station:
        station.ask("rows", "decode")
        with pytest.raises(NotServed, match="it has no graphs"):
            station.ask("replays", "decode", -1)


def test_a_process_that_ends_is_told() -> None:
    """And the next question begins another one."""

    def dies(kind: Any) -> Any:
        import os

        return type(kind.__name__, (kind,), {"forward_extend": lambda *given, **named: os._exit(3)})

    with _station("page16", dies) as station:
        with pytest.raises(RuntimeError, match="SGLang's process ended in this item"):
            station.ask("rows", "extend")
        station.ask("rows", "decode")


def _refuses(kind: Any) -> Any:
    """A constructor that SGLang's server would end at."""

    def __init__(self: Any, *arguments: Any) -> None:
        raise AssertionError("no windows here")

    return type(kind.__name__, (kind,), {"__init__": __init__})


def _says_no(kind: Any) -> Any:
    """A refusal in words, at a forward."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        raise AssertionError("this backend doesn't support it")

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


@pytest.mark.parametrize("patch", [_refuses, _says_no])
def test_a_refusal_is_not_served(patch: Patch) -> None:
    """What SGLang itself refuses is no wrong answer."""
    with _station("page16", patch) as station, pytest.raises(NotServed, match="refuses"):
        station.ask("rows", "decode")


def test_a_lost_device_is_not_asked_again() -> None:
    """Behind a CUDA error the next question gets a process of its own."""

    def faults(kind: Any) -> Any:
        def init_forward_metadata(self: Any, batch: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})

    with _station("page16", faults) as station:
        with pytest.raises(RuntimeError, match="CUDA error"):
            station.ask("rows", "decode")
        assert station._process is None
