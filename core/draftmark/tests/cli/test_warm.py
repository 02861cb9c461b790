"""The commands `draftmark warm` and `draftmark explain`, with a plugin that has kernels and one that has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

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
