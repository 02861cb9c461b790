"""The commands `draftmark warm` and `draftmark explain`, with a plugin that has kernels and one that has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftmark import AttentionShape
from draftmark_tools.cli.model_shapes import model_shapes

Run = Callable[..., Any]
PLUGIN = """
from draftmark import BackendInfo, BackendPlugin, Form, LAYOUT_FORMS, KernelChoice, WarmedKernels

class Plugin(BackendPlugin):
    info = BackendInfo("oven", "cuda", 0, True, forms=LAYOUT_FORMS)

    def buffers(self, geometry):
        return []

    def open_backend(self, geometry, arena):
        raise RuntimeError("opened, although no device was asked for")

    def warm(self, geometries, progress):
        (geometry,) = geometries
        progress(1, 2, f"bake_sm{geometry.device.arch}")
        progress(2, 2, f"bake_{len(geometry.forms)}_forms")
        return WarmedKernels(5, 2, 1, 2048, "/kernels")

    def explain(self, geometry, batch):
        return [KernelChoice("tile", "64 x 128", f"{batch.num_reqs} requests of {batch.q_len} rows", ("16 x 64",))]
"""


@pytest.fixture
def oven(distribution: Callable[..., Any]) -> None:
    distribution("oven", source=PLUGIN)


def test_warm_shows_progress_and_the_result(draftmark: Run, oven: None) -> None:
    """`warm` names each compiled kernel on stderr, and says how many were compiled, found and shipped."""
    done = draftmark("warm", "oven", "--arch", "sm_80", "--forms", "engine_slots,strided_kv")
    assert done.code == 0
    assert done.err.splitlines() == ["1 of 2 kernels compiled: bake_sm80", "2 of 2 kernels compiled: bake_2_forms"]
    assert "5 kernels of oven are ready (2.0 KiB): 2 compiled in" in done.out
    assert "2 found in /kernels, 1 in installed packages" in done.out


def test_warm_prints_json(draftmark: Run, oven: None) -> None:
    """With --json, stdout is one object."""
    found = draftmark("warm", "oven", "--json").json
    assert found["schema"] == 1 and found["kernels"]["compiled"] == 2 and found["kernels"]["folder"] == "/kernels"


def test_warm_fails_when_a_kernel_does_not_compile(draftmark: Run, distribution: Callable[..., Any]) -> None:
    """A kernel that cannot be compiled is counted in the result, and the exit code is 1."""
    distribution("oven", source=PLUGIN.replace('2048, "/kernels")', '2048, "/kernels", failed=3)'))
    done = draftmark("warm", "oven")
    assert done.code == 1 and done.out.endswith("1 in installed packages; 3 could not be compiled\n")


def test_warm_compiles_kernels_of_recurrent_layers(draftmark: Run, distribution: Callable[..., Any]) -> None:
    """With --state the plugin gets the model's recurrent layers; a backend that does not serve them refuses."""
    serves = PLUGIN.replace("forms=LAYOUT_FORMS)", "forms=LAYOUT_FORMS, recurrences=(Recurrence.DELTA,))")
    serves = serves.replace("BackendInfo, ", "BackendInfo, Recurrence, ").replace(
        'f"bake_{len(geometry.forms)}_forms"', 'f"bake_{geometry.state.num_heads}_heads"'
    )
    state = "\n    def state_supports(self, geometry):\n        return []\n"
    distribution("oven", source=serves + state)
    done = draftmark("warm", "oven", "--state", "qwen3-next", "--ranks", 2, "--arch", 80)
    assert done.err.splitlines() == ["1 of 2 kernels compiled: bake_sm80", "2 of 2 kernels compiled: bake_16_heads"]
    distribution("plain", source=PLUGIN.replace('"oven"', '"plain"'))
    assert "recurren" in draftmark("warm", "plain", "--state", "qwen3-next").err
    assert "add it" in draftmark("warm", "oven", "--state-dtype", "float32").err


def test_explain_prints_each_choice(draftmark: Run, oven: None) -> None:
    """`explain` prints the choice, its reason and its candidates for the batch of the arguments."""
    done = draftmark("explain", "oven", "--mode", "verify", "--num-reqs", 4, "--num-draft-tokens", 16)
    assert done.code == 0
    assert done.out.splitlines()[-1].split() == [
        "tile",
        "64",
        "x",
        "128",
        "4",
        "requests",
        "of",
        "16",
        "rows",
        "16",
        "x",
        "64",
    ]
    batch = draftmark("explain", "oven", "--rows", 1, "--prefix-len", -1, "--tree", "--json").json["batch"]
    assert batch == {"mode": "decode", "num_reqs": 8, "q_len": 1, "prefix_len": -1, "tree": True}


def test_a_plugin_without_kernels_says_so(draftmark: Run) -> None:
    """Both commands succeed for a plugin without the hooks, and name it."""
    warmed, explained = draftmark("warm", "reference"), draftmark("explain", "reference")
    assert warmed.code == explained.code == 0
    assert warmed.out == "reference has no kernels to compile ahead of time\n"
    assert explained.out == "reference does not explain its kernels\n"
    assert draftmark("warm", "reference", "--json").json["kernels"] is None


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("--mode", "draft"), "--mode is draft, which the geometry does not have; add --modes extend,decode,verify"),
        (("--rows", 2), "--rows is 2, but it must be from 1 to 1: decode has at most that many rows"),
        (("--num-reqs", 65), "--num-reqs is 65, but it must be from 1 to 64"),
        (("--prefix-len", -2), "--prefix-len is -2, but it must be from -1 to 8192"),
        (("--arch", "sm_x"), "'sm_x' is not a compute capability times ten; write 90 or sm_90"),
        (("--forms", "slots"), "'slots' is not a valid Form; write engine_slots"),
        (("--modes", "VERIFY"), "'VERIFY' is not a valid Mode; write target, draft, extend"),
    ],
)
def test_explain_rejects_a_batch_that_the_geometry_lacks(draftmark: Run, argv: tuple[Any, ...], text: str) -> None:
    """A mode, size or length outside of the geometry is one line with the limit, and exit code 2."""
    done = draftmark("explain", "reference", *argv)
    assert done.code == 2 and text in done.err and len(done.err.splitlines()) == 1


DENSE = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "model_type": "llama"}
LATENT = DENSE | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "num_attention_heads": 128}


def write(folder: Path, **config: Any) -> str:
    """Write a config.json, and return its folder."""
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("fields", "heads", "windows", "other"),
    [
        ({}, (32, 8, 128), [-1], {}),
        ({"head_dim": 80, "torch_dtype": "float16"}, (32, 8, 80), [-1], {"q_dtype": "float16", "kv_dtype": "float16"}),
        ({"num_key_value_heads": None}, (32, 32, 128), [-1], {}),
        ({"sliding_window": 4096}, (32, 8, 128), [-1, 4095], {}),
        ({"sliding_window": 4096, "use_sliding_window": False}, (32, 8, 128), [-1], {}),
        ({"sliding_window": 128, "layer_types": ["sliding_attention"]}, (32, 8, 128), [127], {}),
        ({"sliding_window": 4096, "attn_logit_softcapping": 50.0}, (32, 8, 128), [-1, 4095], {"logits_soft_cap": 50.0}),
        ({"model_type": "gpt_oss", "head_dim": 64}, (32, 8, 64), [-1], {"sinks": True}),
        ({"layer_types": ["linear_attention", "full_attention"]}, (32, 8, 128), [-1], {}),
    ],
    ids=str,
)
def test_shapes_of_a_model(
    tmp_path: Path, fields: dict[str, Any], heads: tuple[int, int, int], windows: list[int], other: dict[str, Any]
) -> None:
    """Heads, dtype, windows, soft cap and sinks come from config.json, once for each kind of layer."""
    wanted = [AttentionShape(*heads, 16, window_left=window, **other) for window in windows]
    assert model_shapes(write(tmp_path, **DENSE | fields), 1, 16) == wanted
    nested = write(tmp_path, model_type="any", text_config=DENSE | fields)
    assert model_shapes(nested, 1, 16) == wanted


def test_layer_types_can_have_their_own_heads(tmp_path: Path) -> None:
    """Full-attention layers of Gemma 4 have other KV heads and another head_dim than its windowed layers."""
    types = ["sliding_attention", "full_attention"]
    own = {"num_global_key_value_heads": 2, "global_head_dim": 256, "layer_types": types, "sliding_window": 512}
    assert model_shapes(write(tmp_path, **DENSE | own), 1, 16) == [
        AttentionShape(32, 2, 256, 16), AttentionShape(32, 8, 128, 16, window_left=511),
    ]  # fmt: skip


@pytest.mark.parametrize(("ranks", "heads"), [(2, (16, 4)), (8, (4, 1)), (16, (2, 1))])
def test_ranks_divide_the_heads(tmp_path: Path, ranks: int, heads: tuple[int, int]) -> None:
    """A rank has its share of the query heads, and at least one KV head; a latent row is never divided."""
    (found,) = model_shapes(write(tmp_path, **DENSE), ranks, 16, kv_dtype="float8_e4m3fn")
    assert found == AttentionShape(*heads, 128, 16, kv_dtype="float8_e4m3fn")
    (latent,) = model_shapes(write(tmp_path, **LATENT), ranks, 16)
    assert (latent.num_qo_heads, latent.head_dim, latent.value_dim, latent.latent) == (128 // ranks, 576, 512, True)


def test_warm_compiles_every_shape_of_a_model(draftmark: Run, distribution: Callable[..., Any], tmp_path: Path) -> None:
    """With --model the backend gets one geometry for each attention shape, with the limits of the arguments."""
    shown = "raise ValueError([(g.attention.window_left, g.attention.num_kv_heads, g.max_reqs) for g in geometries])"
    distribution("oven", source=PLUGIN.replace("(geometry,) = geometries", shown))
    model = write(tmp_path, **DENSE, sliding_window=128)
    done = draftmark("warm", "oven", "--model", model, "--ranks", 2, "--max-num-reqs", 5)
    assert done.code == 1 and "[(-1, 4, 5), (127, 4, 5)]" in done.err


@pytest.mark.parametrize(
    ("config", "argv", "text"),
    [
        (DENSE, ("--head-dim", 64), "--head-dim is given next to --model"),
        (DENSE, ("--ranks", 3), "--ranks is 3, but it must divide 32 query heads"),
        (DENSE, ("--ranks", 0), "--ranks is 0, but it must be 1 or more"),
        (DENSE | {"layer_types": ["mamba"]}, (), "whose layer_types name no layer with attention"),
        (LATENT | {"index_topk": 0}, (), "config.index_topk is 0, but it must be an integer of 1"),
        ({"model_type": "t5"}, (), "config.json has num_attention_heads = None"),
        (None, (), "which has no config.json; name a model's folder"),
        ("{", (), "config.json is not JSON"),
        ("[]", (), "config.json is not a JSON object"),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_read_is_one_line(
    draftmark: Run, tmp_path: Path, config: Any, argv: tuple[Any, ...], text: str
) -> None:
    """A missing or unusable configuration, or a contradicting argument, is one line and exit code 2."""
    if isinstance(config, str):
        (tmp_path / "config.json").write_text(config)
    elif config is not None:
        write(tmp_path, **config)
    done = draftmark("warm", "reference", "--model", tmp_path, *argv)
    assert done.code == 2 and text in done.err and len(done.err.splitlines()) == 1, done.err
