"""Operations that a recorded graph refuses, and the text of each error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from draftmark.errors import CaptureError
from draftmark_reference.graphs import RecordedGraph, mark_host

X = torch.arange(6.0)
ROWS = torch.tensor([0, 2, 1])
MASK = X > 2

HOST_READS: dict[str, Callable[[], Any]] = {
    "Tensor.item": lambda: X[0].item(),
    "Tensor.tolist": lambda: X.tolist(),
    "Tensor.cpu": lambda: X.cpu(),
    'Tensor.to("cpu")': lambda: X.to("cpu"),
    "Tensor.numpy": lambda: X.numpy(),
    "Tensor.__array__": lambda: np.asarray(X),
    "Tensor.__bool__": lambda: 1 if X[0] > 1 else 2,
    "Tensor.__int__": lambda: int(X[0]),
    "Tensor.__float__": lambda: float(X[0]),
    "Tensor.__repr__": lambda: print(X),
    "Tensor.__format__": lambda: f"{X}",
    "Tensor.__dlpack__": lambda: np.from_dlpack(X),
    "Tensor.__contains__": lambda: 3.0 in X,
    "tensor_split by a tensor": lambda: torch.tensor_split(X, ROWS),
    "aten.equal": lambda: torch.equal(X, X),
    "aten.": lambda: X[: ROWS[1]],
}
DYNAMIC_SIZES: dict[str, Callable[[], Any]] = {
    "aten.nonzero": lambda: X.nonzero(),
    "aten.index.Tensor": lambda: X[MASK],
    "aten.index_put_": lambda: X.index_put_((MASK,), X[:3]),
    "aten.masked_select": lambda: X.masked_select(MASK),
    "aten._unique2": lambda: torch.unique(ROWS),
    "aten.unique_consecutive": lambda: torch.unique_consecutive(ROWS),
    "aten.repeat_interleave.Tensor": lambda: ROWS.repeat_interleave(ROWS),
    "aten.bincount": lambda: ROWS.bincount(),
}
PAGEABLE_COPIES: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.tensor([1, 2]),
    "tensor_device": lambda: torch.tensor(1, device=X.device),
    "new_tensor": lambda: X.new_tensor([1, 2]),
    "as_tensor": lambda: torch.as_tensor([1, 2]),
    "asarray": lambda: torch.asarray(np.ones(2)),
    "from_numpy": lambda: torch.from_numpy(np.ones(2)),
    "list_index": lambda: X[[0, 2]],
    "list_index_write": lambda: X.__setitem__([0, 2], 1.0),
}


REFUSED = [
    *((name, step, "reads device memory on the host") for name, step in HOST_READS.items()),
    *((name, step, "size of its output depends on data") for name, step in DYNAMIC_SIZES.items()),
]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("name", "step", "why"), REFUSED, ids=[name for name, *_ in REFUSED])
def test_a_host_read_or_a_dynamic_size_is_refused(
    name: str, step: Callable[[], Any], why: str, mode: Callable[[], Any]
) -> None:
    """The error names the operation that reads device memory on the host, or has a size that depends on data."""
    with mode(), pytest.raises(CaptureError) as caught:
        RecordedGraph(step)
    assert str(caught.value).startswith(name) and why in str(caught.value)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", PAGEABLE_COPIES)
def test_a_pageable_copy_is_refused(name: str, mode: Callable[[], Any]) -> None:
    """A copy of Python or numpy data to the device inside the region is refused."""
    before = X.clone()
    with mode(), pytest.raises(CaptureError, match=r"pageable host memory.*fill a static tensor"):
        RecordedGraph(PAGEABLE_COPIES[name])
    assert torch.equal(X, before)


@pytest.mark.parametrize("classes", [(), (3,)])
def test_one_hot_is_refused(classes: tuple[int, ...]) -> None:
    """one_hot reads its maximum on the host; with a class count it does so on some devices, but not on CUDA."""
    with pytest.raises(CaptureError, match="cannot be captured"):
        RecordedGraph(lambda: F.one_hot(ROWS, *classes))


def test_memory_marked_as_host_is_refused() -> None:
    """A tensor marked as pageable host memory, or a view of one, cannot be used inside the region."""
    staging = torch.zeros(6)
    mark_host(staging)
    with pytest.raises(CaptureError, match=r"aten\..* on a tensor in host memory"):
        RecordedGraph(lambda: X.copy_(staging[:]))


def test_an_explicit_generator_is_refused() -> None:
    """An explicit generator is refused; random numbers come from the default generator or from outside the graph."""
    generator = torch.Generator()
    with pytest.raises(CaptureError, match=r"explicit torch\.Generator"):
        RecordedGraph(lambda: torch.rand(2, generator=generator))


def test_set_is_refused_with_record_call_as_remedy() -> None:
    """Triton's interpreter moves data with set_, so the error recommends record_call."""
    with pytest.raises(CaptureError, match=r"aten\.set_.*record_call"):
        RecordedGraph(lambda: torch.empty(0).set_(X.untyped_storage()))


@pytest.mark.parametrize(
    "step",
    [
        lambda: X[0:2].fill_(1.0) + torch.tensor(2.0),
        lambda: X.__setitem__(0, 5.0),
        lambda: X.__setitem__(MASK, 0.0),
        lambda: X[ROWS],
        lambda: X.to(torch.float64).to(X.device),
        lambda: torch.as_tensor(X, device=X.device) + 1,
        lambda: (X.shape[0], len(X), X.data_ptr(), list(X), X.is_contiguous(), X.dtype),
        lambda: X.tensor_split(2),
        lambda: X[None, ..., :3],
    ],
)
def test_operations_that_resemble_a_host_read_pass(step: Callable[[], Any]) -> None:
    """Scalars, shapes, addresses, integer indices and masked fills can be captured."""
    RecordedGraph(step).replay()
