"""The optional hook: cuda_triton's kernels where they are, torch's operations where they are not."""

from __future__ import annotations

import torch

import draftmark_cuda_flashinfer as plugin
from draftmark import load
from draftmark.registry import Available
from draftmark.tree import TorchTreeOps


def test_on_a_gpu_the_loop_gets_cuda_tritons_operations(make_geometry):
    """One launch for the tail, the walk and the compaction, of the other backend."""
    ops = load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cuda"))
    assert type(ops) is type(load("cuda_triton").tree_ops(make_geometry(), torch.device("cuda")))
    assert not isinstance(ops, TorchTreeOps)


def test_without_cuda_triton_torch_serves(make_geometry, monkeypatch):
    """The wheel alone: the hook offers nothing, which is no failure."""
    rows = [Available("reference", "draftmark.reference", "draftmark", "0.1.0", 1)]
    monkeypatch.setattr(plugin, "available", lambda: rows)
    ops = load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cuda"))
    assert isinstance(ops, TorchTreeOps)


def test_on_the_cpu_torch_serves(make_geometry):
    """Triton's interpreter would be right and slow."""
    assert isinstance(load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cpu")), TorchTreeOps)
