"""`explain` names the kernels that the backend launches, and the reason of each choice."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import (
    LAYOUT_FORMS,
    AttentionShape,
    BatchSize,
    DeviceProfile,
    DraftShape,
    Geometry,
    Limits,
    Mode,
    load,
)
from draftmark_cuda_triton import sizing
from draftmark_cuda_triton.decode_verify import DecodeVerify
from draftmark_cuda_triton.explain import _describe
from draftmark_cuda_triton.kernel_list import kernels_of
from draftmark_cuda_triton.launch.operands import BatchExtent

HOPPER, GENERIC = "kernels_sm90 (Hopper, Gluon)", "kernels (any GPU, Triton)"


def geometry_of(arch=90, draft=16, **shape) -> Geometry:
    fields = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16} | shape
    device = DeviceProfile("cuda", arch, 132)
    return Geometry.create(AttentionShape(**fields), Limits(64, 8192), DraftShape(num_draft_tokens=draft), device)


def explained(geometry, *size) -> dict[str, object]:
    """Return the choices of a batch by subject."""
    found = load("cuda_triton").explain(geometry, BatchSize(*size))
    assert found is not None
    assert all(one.reason and (not one.candidates or one.chosen in one.candidates) for one in found), found
    return {one.subject: one for one in found}


@pytest.mark.parametrize(
    ("fields", "kernels", "reason"),
    [
        ({}, HOPPER, "the device is sm_90"),
        ({"arch": 80}, GENERIC, "they need sm_90, and the device is cuda sm_80"),
        ({"head_dim": 32}, GENERIC, "a head_dim from 40 to 256 in steps of 8, and it is 32"),
        ({"q_dtype": "float32", "kv_dtype": "float32"}, GENERIC, "they need 16-bit q"),
        ({"kv_dtype": "float8_e4m3fn", "page_size": 4}, GENERIC, "e4m3 needs pages of a multiple of 8 tokens, not 4"),
    ],
)
def test_kernel_family_has_a_reason(fields, kernels, reason):
    """The kernel family follows architecture, head_dim, dtypes and page size, and the reason names the obstacle."""
    choice = explained(geometry_of(**fields), Mode.DECODE, 8, 1)["kernels"]
    assert choice.chosen == kernels and reason in choice.reason


@pytest.mark.parametrize("fields", [{}, {"arch": 80}, {"num_kv_heads": 4}, {"head_dim": 64}, {"head_dim": 96}], ids=str)
def test_explained_tile_and_splits_are_those_of_a_launch(fields):
    """Tile and number of splits equal what `DecodeVerify` chooses for the same batch size."""
    geometry, chance = geometry_of(**fields), random.Random(5)

    class OnGpu(torch.Tensor):
        is_cuda = True
        __torch_function__ = torch._C._disabled_torch_function_impl

    slots = torch.empty(int(geometry.max_rows_any), dtype=torch.int64).as_subclass(OnGpu)
    buffers = {one.name: slots for one in sizing.decode_verify_buffers(geometry, [Mode.VERIFY])}
    launched = DecodeVerify(geometry, slots, buffers)
    for _ in range(12):
        num_reqs, q_len = chance.randint(1, 64), chance.choice((1, 2, 5, 16))
        config, num_splits = launched.choose_splits(BatchExtent(num_reqs, q_len, q_len, num_reqs * q_len))
        found = explained(geometry, Mode.VERIFY, num_reqs, q_len)
        assert found["tile"].chosen == _describe(config) and found["splits of the keys"].chosen == str(num_splits)
        assert (found["combine"].chosen == "none") == (num_splits == 1)


@pytest.mark.parametrize(
    ("draft", "arch", "kv_dtype"),
    [(1, 90, "bfloat16"), (5, 90, "bfloat16"), (5, 90, "float8_e4m3fn"), (5, 80, "bfloat16")],
)
def test_warming_one_geometry_covers_an_engines_two(draft, arch, kv_dtype):
    """`draftmark warm` with default limits has every kernel of vLLM's builders, which have other limits and forms."""
    shape, device = AttentionShape(32, 8, 128, 16, kv_dtype=kv_dtype), DeviceProfile("cuda", arch, 132)
    verify = (Mode.VERIFY, Mode.RAGGED_VERIFY) if draft > 1 else ()

    def kernels(modes, limits, forms):
        tree = DraftShape(num_draft_tokens=draft)
        return set(kernels_of(Geometry.create(shape, limits, tree, device, modes, forms), trees=False))

    warmed = kernels((Mode.EXTEND, Mode.DECODE, *verify), Limits(64, 8192), ())
    limits = Limits(256, 32768, 8192, overshoot=False, max_kv_len=32768)
    assert warmed >= kernels((Mode.DECODE, *verify), limits, LAYOUT_FORMS)
    assert warmed >= kernels((Mode.EXTEND,), limits, LAYOUT_FORMS)
    assert len(warmed) <= 14


def test_prefill_names_what_lengths_decide():
    """EXTEND after a long prefix is split, a short prompt is not, and unknown lengths are left to the device."""
    geometry = geometry_of()
    after, short = (explained(geometry, Mode.EXTEND, 1, 16, length) for length in (8000, 0))
    assert (
        int(after["splits of the keys"].chosen) > 1
        and "is faster for these lengths" in after["splits of the keys"].reason
    )
    assert short["splits of the keys"].chosen == "1"
    assert "the device decides" in explained(geometry, Mode.EXTEND, 1, 16, -1)["splits of the keys"].reason
    long_prompt = explained(geometry_of(kv_dtype="float8_e4m3fn"), Mode.EXTEND, 4, 2048, 0)
    assert long_prompt["e4m3 keys"].chosen == "upcast once" and long_prompt["kernels"].chosen == HOPPER


def test_compiled_code_has_a_place(monkeypatch, tmp_path):
    """Each kernel of the batch's mode says where its compiled code comes from."""
    monkeypatch.setenv("DRAFTMARK_CACHE_DIR", str(tmp_path))
    found = explained(geometry_of(), Mode.DECODE, 8, 1)
    kernels = {name: one.chosen for name, one in found.items() if name.startswith("kernels")}
    assert "kernels_sm90.decode_verify.attend_decode_verify" in kernels and "kernels.kv_write.write_kv_rows" in kernels
    assert all("not compiled yet" in chosen for name, chosen in kernels.items() if name != "kernels")
