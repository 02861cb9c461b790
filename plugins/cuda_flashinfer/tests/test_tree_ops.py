"""Tests of the choice of tree operations: cuda_triton's on a GPU if it is installed, otherwise torch's."""

from __future__ import annotations

import torch

import draftmark_cuda_flashinfer as plugin
from draftmark import load
from draftmark.registry import Available
from draftmark.tree import TorchTreeOps


def test_gpu_loop_gets_cuda_tritons_operations(make_geometry, monkeypatch):
    """On a GPU the plugin returns cuda_triton's tree operations."""
    monkeypatch.setenv("DRAFTMARK_PREPARE", "0")  # so that no kernel is compiled or loaded, and no GPU is needed
    ops = load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cuda"))
    assert type(ops) is type(load("cuda_triton").tree_ops(make_geometry(), torch.device("cuda")))
    assert not isinstance(ops, TorchTreeOps)


def test_torch_operations_without_cuda_triton(make_geometry, monkeypatch):
    """Without cuda_triton the registry uses torch's tree operations."""
    rows = [Available("reference", "draftmark_reference", "draftmark-reference", "0.1.0", 1)]
    monkeypatch.setattr(plugin, "available", lambda: rows)
    ops = load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cuda"))
    assert isinstance(ops, TorchTreeOps)


def test_torch_operations_on_the_cpu(make_geometry):
    """On the CPU torch's tree operations are used, because Triton's interpreter is slow."""
    assert isinstance(load("cuda_flashinfer").tree_ops(make_geometry(), torch.device("cpu")), TorchTreeOps)
