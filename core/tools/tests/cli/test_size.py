"""The command `draftmark size`."""

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
from draftmark_tools.cli.rendering import human_bytes

Run = Callable[..., Any]

LARGE = ("--max-num-reqs", 256, "--max-context-len", 131072, "--topk", 8, "--num-steps", 5, "--num-draft-tokens", 64)


def test_every_buffer_with_its_formula(draftmark: Run) -> None:
    """The table has each buffer's shape, dtype, bytes and formula, and the total."""
    done = draftmark("size", "reference", *LARGE)
    assert done.code == 0
    row = next(line for line in done.out.splitlines() if line.startswith("slot_mapping"))
    assert row.split() == ["slot_mapping", "16384", "int64", "131,072", "max_rows_any"]
    assert "132,096" in next(line for line in done.out.splitlines() if line.startswith("total"))


def test_json_agrees_with_itself(draftmark: Run) -> None:
    """Bytes are shape times element size, the total is the sum, and lengths equal the geometry's."""
    found = draftmark("size", "reference", *LARGE, "--json").json
    assert found["schema"] == 1
    for line in found["buffers"] + found["batch"]:
        assert line["bytes"] == prod(line["shape"]) * DTYPE_BYTES[line["dtype"]]
    assert found["total_bytes"] == sum(line["bytes"] for line in found["buffers"])
    assert found["lengths"]["max_kv_len"] == 131072 + 64
    assert found["geometry"]["draft"] == {
        "topk": 8,
        "num_steps": 5,
        "num_draft_tokens": 64,
        "block_size": 0,
        "num_modules": 1,
    }


def test_draft_model_and_overlap(draftmark: Run) -> None:
    """`--modes draft` and `--overlap` reach the geometry: the tail is k·(S−1), and KV has room for two tails."""
    argv = ("--modes", "draft", "--num-steps", 5, "--topk", 4, "--overlap", "--max-context-len", 100)
    found = draftmark("size", "reference", *argv, "--json").json
    assert found["lengths"]["max_tail"] == 16
    assert found["lengths"]["max_kv_len"] == 100 + 2 * 16
    assert found["geometry"]["modes"] == ["extend", "draft", "draft_extend"]


def test_a_latent_layer_has_one_row_per_token(draftmark: Run) -> None:
    """DeepSeek V3 at 16 ranks: 8 heads over rows of 576 elements, 73,728 bytes per page of 64."""
    argv = ("--latent", "--num-qo-heads", 8, "--head-dim", 576, "--value-dim", 512, "--softmax-scale", 0.1352)
    found = draftmark("size", "reference", *argv, "--page-size", 64, "--json").json
    assert found["kv_pages"]["page_bytes"] == 64 * 576 * 2
    fields = ("num_kv_heads", "value_dim", "latent", "softmax_scale")
    assert [found["geometry"]["attention"][name] for name in fields] == [1, 512, True, 0.1352]
    assert "8 query heads over latent rows of 576, values of 512" in draftmark("size", "reference", *argv).out
    narrow = draftmark("size", "reference", "--head-dim", 192, "--value-dim", 128)
    assert "8 KV heads × 192, values of 128" in narrow.out
    missing = draftmark("size", "reference", "--latent", "--head-dim", 576)
    assert missing.code == 2 and "attention.softmax_scale is None" in missing.err


def test_a_row_of_656_bytes(draftmark: Run) -> None:
    """DeepSeek V3.2 in fp8_ds_mla: 656 bytes a token; a format that does not exist is refused with the known ones."""
    argv = ("--latent", "--head-dim", 576, "--value-dim", 512, "--softmax-scale", 0.1352, "--page-size", 64)
    argv += ("--row-format", "fp8_ds_mla", "--forms", "engine_stores")
    found = draftmark("size", "reference", *argv, "--json").json
    assert found["kv_pages"]["page_bytes"] == 64 * 656
    assert found["geometry"]["attention"]["row_format"] == "fp8_ds_mla"
    assert "latent rows of 576 in 656 bytes (fp8_ds_mla), values of 512" in draftmark("size", "reference", *argv).out
    wrong = draftmark("size", "reference", "--row-format", "fp8")
    assert wrong.code == 2 and "choose from 'plain', 'fp8_ds_mla'" in wrong.err


def test_captured_padding_counts(draftmark: Run) -> None:
    """A captured size above max_num_reqs determines every buffer's size (sglang#25124)."""
    found = draftmark("size", "reference", "--max-num-reqs", 3, "--capture-batch-sizes", "1,2,4", "--json").json
    assert found["buffers"][0]["shape"] == [4]


def test_cuda_backends_default_to_a_hopper_profile(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """A CUDA backend is sized for sm_90 without a driver; --arch and --num-sms replace the default."""
    distribution("metal", device="cuda", host_kernels=False)
    device = draftmark("size", "metal", "--json").json["geometry"]["device"]
    assert device == {"kind": "cuda", "arch": 90, "num_sms": 132}
    device = draftmark("size", "metal", "--arch", 120, "--num-sms", 170, "--json").json["geometry"]["device"]
    assert device == {"kind": "cuda", "arch": 120, "num_sms": 170}


@pytest.mark.parametrize("modes", [TARGET_MODES, DRAFT_MODES])
def test_size_lists_every_tensor_of_batch_buffers(make_geometry: Callable[..., Geometry], modes: Any) -> None:
    """The torch-free list contains every tensor of BatchBuffers, with equal sizes in bytes."""
    fields = {"topk": 3, "num_steps": 13, "num_draft_tokens": 5, "capture_batch_sizes": (1, 7)}
    geometry = make_geometry(modes=modes, **fields)
    buffers = BatchBuffers(geometry, "cpu")
    real = {name: value for name, value in vars(buffers).items() if isinstance(value, torch.Tensor)}
    lines = {one.name: one for one in batch_tensors(geometry)}
    assert set(lines) == set(real)
    for name, tensor in real.items():
        assert lines[name].nbytes == tensor.nbytes, name


def test_a_refusal_prints_the_backends_reasons(draftmark: Run) -> None:
    """A geometry that the backend does not serve prints the backend's reasons, with exit code 1."""
    done = draftmark("size", "reference", "--kv-dtype", "float8_e4m3fn")
    assert (done.code, done.out) == (1, "")
    assert "reference stores KV as float32, float16 or bfloat16" in done.err


def test_size_works_with_a_broken_torch(run_python: Run, broken_torch: Path) -> None:
    """`size` succeeds when `import torch` raises, and does not import torch."""
    code = (
        "import sys; from draftmark_tools.cli import main\n"
        "code = main(['size', 'reference']); assert 'torch' not in sys.modules; sys.exit(code)"
    )
    done = run_python(code, broken_torch)
    assert (done.returncode, done.err) == (0, "")
    assert "slot_mapping" in done.out


def test_output_of_a_plugin_does_not_damage_json(draftmark: Run, distribution: Callable[..., Path]) -> None:
    """Text that a plugin prints while it loads goes to stderr."""
    distribution("chatty", extra="print('hello from the vendor')")
    done = draftmark("size", "chatty", "--json")
    assert done.json["backend"] == "chatty" and done.err == "hello from the vendor\n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("--num-draft-tokens", 1_000_000_000), "--num-draft-tokens is 1,000,000,000, but a request has at most 8,192"),
        (("--device", "gpu"), "--device is 'gpu', but it must be a torch device type; write cuda"),
        (("--device", "cuda:0"), "--device is 'cuda:0'"),
        (("--page-size", -16), "attention.page_size is -16, but it must be >= 1; use the KV cache's tokens per page"),
    ],
)
def test_impossible_sizes_are_refused(draftmark: Run, argv: Any, named: str) -> None:
    """A draft longer than a request, an unknown device or a negative page size exits 2 with a one-sentence error."""
    done = draftmark("size", "reference", *argv)
    assert (done.code, done.out) == (2, "")
    assert named in done.err and done.err.count("\n") == 1


@pytest.mark.parametrize(("short", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")])
def test_short_dtype_names_are_accepted(draftmark: Run, short: str, dtype: str) -> None:
    """A short dtype name such as bf16 is accepted and selects the torch dtype."""
    attention = draftmark("size", "reference", "--dtype", short, "--json").json["geometry"]["attention"]
    assert (attention["q_dtype"], attention["kv_dtype"]) == (dtype, dtype)


def test_the_geometry_shows_its_scale(draftmark: Run) -> None:
    """`draftmark size` prints softmax_scale in the geometry, and also prints sinks if the layer has them."""
    assert "no window, softmax_scale 0.125\n" in draftmark("size", "reference", "--head-dim", 64).out
    assert "softmax_scale 0.125 with sinks\n" in draftmark("size", "reference", "--head-dim", 64, "--sinks").out


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 50, "5.0 PiB"), (7 << 70, "7,168.0 EiB")],
)
def test_every_number_of_bytes_has_a_unit(count: int, text: str) -> None:
    """Numbers of bytes have a unit, also beyond terabytes."""
    assert human_bytes(count) == text
