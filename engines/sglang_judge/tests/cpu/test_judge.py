"""Tests that `draftmark judge sglang:triton` finds defects. Each judged backend is SGLang's own plus one defect.

Scheduler processes are forked from this process, so that a defect can be passed as a class.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftmark_contract.check import ContractViolation, Refused
from draftmark_sglang_judge.batches import forward_batch
from draftmark_sglang_judge.items import NEAR
from draftmark_sglang_judge.requests import place
from draftmark_sglang_judge.scheduler_process import SchedulerProcess
from draftmark_sglang_judge.setups import SETUPS, Scene, eager_scenes

Patch = Callable[[Any], Any]


@contextmanager
def _process(setup: str, patch: Patch = lambda kind: kind, backend: str = "triton") -> Iterator[SchedulerProcess]:
    process = SchedulerProcess(setup, backend, "cpu", patch)
    try:
        yield process
    finally:
        process.end()


def _sees_every_draft(kind: Any) -> Any:
    """Return a backend class with a defect: it verifies without the tree mask (sglang#32269)."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        kind.init_forward_metadata(self, batch)
        self.forward_metadata.custom_mask = None

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


def _keeps_the_capture(kind: Any) -> Any:
    """Return a backend class with a defect: a replay reads the index buffers of the capture (sglang#26019)."""

    def init_forward_metadata_out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        if in_capture:
            kind.init_forward_metadata_out_graph(self, batch, in_capture=True)

    return type(kind.__name__, (kind,), {"init_forward_metadata_out_graph": init_forward_metadata_out_graph})


def _moves_its_buffer(kind: Any) -> Any:
    """Return a backend class with a defect: a replay fills a new tensor, which captured kernels do not read.

    The bug is known from sglang#27664.
    """

    def init_forward_metadata_out_graph(self: Any, batch: Any, in_capture: bool = False) -> None:
        if not in_capture:
            self.cuda_graph_kv_indices = torch.zeros_like(self.cuda_graph_kv_indices)
        kind.init_forward_metadata_out_graph(self, batch, in_capture=in_capture)

    return type(kind.__name__, (kind,), {"init_forward_metadata_out_graph": init_forward_metadata_out_graph})


def _stores_one_further(kind: Any) -> Any:
    """Return a backend class with a defect: it stores each row's K and V one slot too far."""

    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, batch: Any, **named: Any) -> Any:
        batch.out_cache_loc = batch.out_cache_loc + 1
        return kind.forward_decode(self, q, k, v, layer, batch, **named)

    return type(kind.__name__, (kind,), {"forward_decode": forward_decode})


def _counts_one_too_few(kind: Any) -> Any:
    """Return a backend class with a defect: an index buffer is too small, as `seq_lens_sum` is (sglang#26753)."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        batch.seq_lens_sum -= 3
        kind.init_forward_metadata(self, batch)

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


@pytest.mark.parametrize("scene", eager_scenes(SETUPS["page1-tree"]), ids=lambda one: one.name)
def test_batch_is_on_the_device(scene: Scene) -> None:
    """All tensors of a judged batch except `seq_lens_cpu` are on the judged device (here torch's meta device)."""
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=None)
    with torch.device("meta"):
        batch = forward_batch(place(scene, SETUPS["page1-tree"], 512), runner)
    parts = vars(batch.spec_info or SimpleNamespace()) | vars(batch)
    homes = {name: one.device.type for name, one in parts.items() if isinstance(one, torch.Tensor)}
    assert homes.pop("seq_lens_cpu") == "cpu" and set(homes.values()) == {"meta"}, homes


def test_unchanged_backend_is_right() -> None:
    """SGLang's own Triton backend passes the checks that find the added defects."""
    with _process("page16") as process:
        process.ask("stores", "decode")
        process.ask("replays", "decode", -1)
    with _process("page1-tree") as process:
        process.ask("rows", "verify-random")
        process.ask("context_end", "verify", NEAR, False)


@pytest.mark.parametrize(
    ("setup", "patch", "question", "message"),
    [
        ("page1-tree", _sees_every_draft, ("rows", "verify-random"), "is not attention over the"),
        ("page16", _keeps_the_capture, ("replays", "decode", -1), "is not attention over the"),
        ("page16", _moves_its_buffer, ("replays", "decode", -1), "is not attention over the"),
        ("page16", _stores_one_further, ("stores", "decode"), "cache differs from the expected one"),
        ("page1-tree", _counts_one_too_few, ("context_end", "verify", NEAR, False), "3 elements were written past the"),
    ],
    ids=lambda one: one.__name__.strip("_") if callable(one) else None,
)
def test_defect_is_found(setup: str, patch: Patch, question: tuple[Any, ...], message: str) -> None:
    """The check of the rule that a defect breaks fails with the expected message."""
    with _process(setup, patch) as process, pytest.raises(ContractViolation, match=message):
        process.ask(*question)


def test_defect_over_latent_rows_is_found() -> None:
    """Over MLA rows SGLang's Triton backend verifies trees right, and a verification without the mask is found."""
    with _process("page1-tree", backend="triton_mla") as process:
        process.ask("rows", "verify-random")
        process.ask("stores", "decode")
    wrong = pytest.raises(ContractViolation, match="is not attention over the")
    with _process("page1-tree", _sees_every_draft, "triton_mla") as process, wrong:
        process.ask("rows", "verify-random")


def test_backend_without_graphs_is_not_served() -> None:
    """For a backend without CUDA graphs, checks of replays report "not served", neither right nor wrong."""
    with _process("page16", backend="torch_native") as process:
        process.ask("rows", "decode")
        with pytest.raises(Refused, match="it has no CUDA graphs"):
            process.ask("replays", "decode", -1)


def test_ended_process_is_reported() -> None:
    """If the scheduler's process ends during a check, an error is raised, and the next check starts another process."""

    def dies(kind: Any) -> Any:
        import os

        return type(kind.__name__, (kind,), {"forward_extend": lambda *arguments, **named: os._exit(3)})

    with _process("page16", dies) as process:
        with pytest.raises(RuntimeError, match="SGLang's process ended during this item"):
            process.ask("rows", "extend")
        process.ask("rows", "decode")


def _constructor_rejects(kind: Any) -> Any:
    """Return a backend class with a constructor that raises, so that SGLang's server would not start."""

    def __init__(self: Any, *arguments: Any) -> None:
        raise AssertionError("no windows here")

    return type(kind.__name__, (kind,), {"__init__": __init__})


def _forward_rejects(kind: Any) -> Any:
    """Return a backend class that rejects the input of a forward with an assertion."""

    def init_forward_metadata(self: Any, batch: Any) -> None:
        raise AssertionError("this backend doesn't support it")

    return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})


@pytest.mark.parametrize("patch", [_constructor_rejects, _forward_rejects])
def test_rejection_is_not_served(patch: Patch) -> None:
    """For an input that SGLang itself rejects, a check reports "not served", which is not a wrong result."""
    with _process("page16", patch) as process, pytest.raises(Refused, match="rejects"):
        process.ask("rows", "decode")


def test_lost_device_ends_the_process() -> None:
    """After a CUDA error, the judge's next check starts another process."""

    def faults(kind: Any) -> Any:
        def init_forward_metadata(self: Any, batch: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        return type(kind.__name__, (kind,), {"init_forward_metadata": init_forward_metadata})

    with _process("page16", faults) as process:
        with pytest.raises(RuntimeError, match="CUDA error"):
            process.ask("rows", "decode")
        assert process._process is None
