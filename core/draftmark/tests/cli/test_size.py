"""`draftmark size`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmark import DRAFT_MODES, TARGET_MODES, Geometry
from draftmark.batch import BatchBuffers
from draftmark.batch_tensors import batch_tensors
from draftmark.geometry import DTYPE_BYTES

Run = Callable[..., Any]

LARGE = ("--max-num-reqs", 256, "--max-context-len", 131072, "--topk", 8, "--num-steps", 5, "--num-draft-tokens", 64)


def test_every_buffer_with_its_formula(draftmark: Run) -> None:
    """The table names each buffer's role, shape, dtype, unit, bytes and formula, and their total."""
    done = draftmark("size", "reference", *LARGE)
    assert done.code == 0
    row = next(line for line in done.out.splitlines() if line.startswith("slot_mapping"))
    assert row.split() == ["slot_mapping", "slot_mapping", "16384", "int64", "tokens", "131,072", "max_rows_any"]
    assert "132,096" in next(line for line in done.out.splitlines() if line.startswith("total"))


def test_json_agrees_with_itself(draftmark: Run) -> None:
    """Bytes are shape times element size, the total is their sum, and lengths are the geometry's."""
    found = draftmark("size", "reference", *LARGE, "--json").json
    assert found["schema"] == 1
    for line in found["buffers"] + found["batch"]:
        assert line["bytes"] == prod(line["shape"]) * DTYPE_BYTES[line["dtype"]]
    assert found["total_bytes"] == sum(line["bytes"] for line in found["buffers"])
    assert found["lengths"]["max_kv_len"] == 131072 + 64
    assert found["geometry"]["draft"] == {"topk": 8, "num_steps": 5, "num_draft_tokens": 64, "block_size": 0}


def test_draft_model_and_overlap(draftmark: Run) -> None:
    """`--modes draft` and `--overlap` reach the geometry: the tail is k·(S−1), the headroom is there twice."""
    argv = ("--modes", "draft", "--num-steps", 5, "--topk", 4, "--overlap", "--max-context-len", 100)
    found = draftmark("size", "reference", *argv, "--json").json
    assert found["lengths"]["max_tail"] == 16
    assert found["lengths"]["max_kv_len"] == 100 + 2 * 16
    assert found["geometry"]["modes"] == ["extend", "draft", "draft_extend"]


def test_captured_padding_counts(draftmark: Run) -> None:
    """A captured size above the live limit sizes every buffer (sglang#25124)."""
    found = draftmark("size", "reference", "--max-num-reqs", 3, "--capture-batch-sizes", "1,2,4", "--json").json
    assert found["buffers"][0]["shape"] == [4]


def test_device_profile_of_cuda_is_a_hopper_unless_told(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A CUDA backend is sized for sm_90 without asking a driver; --arch and --num-sms say otherwise."""
    distribution("metal", device="cuda", host_kernels=False)
    device = draftmark("size", "metal", "--json").json["geometry"]["device"]
    assert device == {"kind": "cuda", "arch": 90, "num_sms": 132}
    device = draftmark("size", "metal", "--arch", 120, "--num-sms", 170, "--json").json["geometry"]["device"]
    assert device == {"kind": "cuda", "arch": 120, "num_sms": 170}


@pytest.mark.parametrize("modes", [TARGET_MODES, DRAFT_MODES])
def test_batch_tensors_of_the_table_are_those_of_the_batch(make_geometry: Callable[..., Geometry], modes: Any) -> None:
    """Every tensor that BatchBuffers holds is in the torch-free list, byte for byte."""
    fields = {"topk": 3, "num_steps": 13, "num_draft_tokens": 5, "capture_batch_sizes": (1, 7)}
    geometry = make_geometry(modes=modes, **fields)
    buffers = BatchBuffers(geometry, "cpu")
    real = {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
    lines = {one.name: one for one in batch_tensors(geometry)}
    assert set(lines) == set(real)
    for name, tensor in real.items():
        assert lines[name].nbytes == tensor.nbytes, name


def test_a_refusal_is_the_backends_own_sentence(draftmark: Run) -> None:
    """A geometry that the backend refuses ends in its reasons, with exit code 1."""
    done = draftmark("size", "reference", "--kv-dtype", "float8_e4m3fn")
    assert (done.code, done.out) == (1, "")
    assert "reference stores KV as float32, float16 or bfloat16" in done.err


def test_works_where_torch_does_not(run_python: Run, broken_torch: Path) -> None:
    """`size` succeeds where `import torch` raises, and imports no torch."""
    code = (
        "import sys; from draftmark.cli import main\n"
        "code = main(['size', 'reference']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = run_python(code, broken_torch)
    assert (done.returncode, done.err) == (0, "")
    assert "slot_mapping" in done.out


def test_a_plugin_that_prints_does_not_spoil_the_object(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """What a plugin prints when it is loaded goes to stderr."""
    distribution("chatty", extra="print('hello from the vendor')")
    done = draftmark("size", "chatty", "--json")
    assert done.json["backend"] == "chatty" and done.err == "hello from the vendor\n"
