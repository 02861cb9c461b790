"""Random batches of layers that may round to e4m3, on a GPU, against float64 with the contract's bound."""

from __future__ import annotations

import random

import pytest
import torch

from draftmark import AttentionShape, DraftShape, Geometry, Limits, Mode
from draftmark.devices import device_profile
from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.cases.contents import Contents
from draftmark_contract.cases.forwards import ForwardCase, ragged, uniform
from draftmark_contract.check import Tier
from draftmark_contract.harness.harness import Harness
from draftmark_cuda_triton import TritonPlugin

SHAPES = (
    # query heads, KV heads, head_dim, page size, window, cap, dtype, draft tokens
    (8, 1, 128, 64, -1, 0.0, "bfloat16", 20), (32, 2, 128, 16, -1, 0.0, "bfloat16", 16),
    (16, 1, 64, 16, -1, 0.0, "float16", 40), (16, 2, 64, 128, 60, 20.0, "bfloat16", 12),
    (12, 1, 120, 8, 200, 0.0, "bfloat16", 33), (8, 2, 128, 32, -1, 30.0, "float16", 64),
    (6, 1, 112, 24, -1, 0.0, "bfloat16", 25), (10, 2, 48, 16, 100, 0.0, "bfloat16", 60),
)  # fmt: skip


def geometry_of(number: int, device: str) -> Geometry:
    """Return the geometry of one shape, with 280 to 1000 keys and few or many SMs for splits."""
    *heads, window, cap, dtype, nodes = SHAPES[number]
    shape = AttentionShape(
        *heads, q_dtype=dtype, kv_dtype="float8_e4m3fn", window_left=window, logits_soft_cap=cap, round_to_e4m3=True
    )
    limits = Limits(4, (280, 600, 1000)[number % 3], 160)
    modes = (Mode.EXTEND, Mode.DECODE, Mode.VERIFY)
    return Geometry.create(shape, limits, DraftShape(3, 4, nodes), device_profile(device), modes)


def forwards(geometry: Geometry, seed: int) -> list[ForwardCase]:
    """Return a tree, a chain and a prompt of random lengths."""
    chance = random.Random(seed)
    longest = geometry.limits.max_context_len - geometry.limits.max_extend_tokens
    lens = [0, *(chance.randrange(longest) for _ in range(2))]
    rows = [chance.choice((1, 7, 40)), chance.randrange(1, 90), chance.choice((0, 3))]
    return [
        uniform("tree", geometry, Mode.VERIFY, lens, 4, seed=seed),
        uniform("chain", geometry, Mode.VERIFY, lens[::-1], 3, tree="chain", seed=seed),
        ragged("prompt", geometry, lens, rows, padded=1, seed=seed),
    ]


def check(number: int, device: str, tier: Tier, contents: tuple[Contents, ...]) -> None:
    """Check the batches of one shape with these contents."""
    geometry = geometry_of(number, device)
    subject = BackendUnderTest(LoadedBackend("cuda_triton", TritonPlugin()), device, tier)
    for seed in (number, number + 100):
        for forward in forwards(geometry, seed):
            harness = Harness(subject, geometry, forward.num_pages)
            for one in contents:
                harness.assert_forward(
                    forward, harness.load(forward, contents=one), f"{forward.name}, {one}: the output"
                )


@pytest.mark.device
@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_random_batches_are_right(number: int) -> None:
    """Trees, chains and prompts are within the bound, for logits of a few, of hundreds and of 1e5."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("only sm_90 has the kernel")
    check(
        number, "cuda", Tier.DEVICE, (Contents.SPREAD, Contents.FLAT, Contents.NEEDLES, Contents.LARGE, Contents.LEVELS)
    )


@pytest.mark.slow
def test_interpreted_batches_are_right() -> None:
    """Other devices compute the same batches exactly, which the bound allows."""
    check(2, "cpu", Tier.HOST, (Contents.SPREAD,))
