"""Rounds of layers with recurrent state against a float64 loop over rows: every mode, recurrence, gate and dtype."""

from __future__ import annotations

import pytest
import torch

from draftmark import DraftShape, Gate, Limits, Recurrence, StateGeometry, StateShape
from draftmark.devices import device_profile
from plugins.cuda_triton.tools.state_layers import REQUESTS, geometries
from plugins.cuda_triton.tools.state_rounds import Rounds


def run(number: int, geometry: StateGeometry, device: str, rounds: int) -> None:
    """Run rounds of one layer; a wrong output, slot or window raises."""
    one = Rounds(geometry, device, number)
    for _ in range(rounds):
        one.run()


@pytest.mark.parametrize("number", range(8))
def test_rounds_equal_a_loop_over_rows(number):
    """Random rounds of each recurrence and gate give the loop's outputs, states, windows and checkpoints."""
    run(number, geometries(8, "cpu", seed=5, small=True)[number], "cpu", 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(24))
def test_many_rounds_equal_a_loop_over_rows(number):
    """More layers and rounds, with trees of up to 33 rows."""
    run(number, geometries(24, "cpu", seed=1, small=True)[number], "cpu", 8)


@pytest.mark.slow
@pytest.mark.parametrize("gate", [Gate.HEAD, Gate.KEY])
def test_trees_of_256_rows(gate):
    """A verify of 256 rows has masks of eight words and 16 blocks of rows."""
    shape = StateShape(Recurrence.DELTA, gate, 1, 1, 16, 16, 8, 4, "float32")
    limits = Limits(REQUESTS, 4096, 400, (REQUESTS + 1,), row_budgets=(256, REQUESTS * 256), state_interval=8)
    run(0, StateGeometry.create(shape, limits, DraftShape(2, 3, 256), num_layers=3), "cpu", 3)


@pytest.mark.device
def test_rounds_on_the_device():
    """1,000 rounds over 40 layers are right on a GPU, half of them in CUDA graphs; no layer waits for the host."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    for number, geometry in enumerate(geometries(40, "cuda")):
        run(number, geometry, "cuda", 25)


@pytest.mark.device
@pytest.mark.parametrize("key_dim", [128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_verifies_of_one_block_on_the_device(key_dim, dtype):
    """Layers that share scratch memory, with trees of 16 rows, do not read each other's matrices."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    shape = StateShape(Recurrence.DELTA, Gate.HEAD, 8, 4, key_dim, 128, 40, 4, dtype)
    limits = Limits(REQUESTS, 4096, 400, (REQUESTS + 1,), row_budgets=(16, REQUESTS * 16))
    run(0, StateGeometry.create(shape, limits, DraftShape(4, 4, 16), device_profile("cuda"), num_layers=3), "cuda", 60)
