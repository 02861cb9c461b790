"""Configurations for Triton's interpreter: tiles grow and splits become fewer, within the allocated buffers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draftmark_cuda_triton.heuristics import common, interpreted
from draftmark_cuda_triton.heuristics.common import KernelConfig
from plugins.cuda_triton.tests.shapes import shape


@pytest.mark.parametrize(
    ("page_size", "block_n", "max_kv_len", "keys"),
    [
        (16, 64, 5, 16),
        (16, 64, 9, 16),
        (16, 64, 100, 128),
        (16, 64, 5000, 256),
        (64, 64, 5000, 64),
        (128, 64, 5000, 128),
        (1024, 64, 9, 256),
    ],
)
def test_block_n_of_an_interpreted_config(page_size, block_n, max_kv_len, keys):
    """block_n divides the page size if a tile lies in one page; else it covers the longest request, up to 256 keys."""
    config, _ = interpreted.interpreted_config(
        shape(128, page_size=page_size), KernelConfig(16, block_n, 4, 3, 2), 1, 9, max_kv_len
    )
    assert config.block_n == keys


@pytest.mark.parametrize(("max_kv_len", "num_splits"), [(128, 1), (256, 1), (257, 2)])
def test_request_of_one_tile_is_not_split(max_kv_len, num_splits):
    """A request of one tile has one split, since a second one would have no work."""
    assert interpreted.interpreted_config(shape(128), KernelConfig(16, 64, 4, 3, 2), 1, 9, max_kv_len)[1] == num_splits


def test_interpreted_row_tiles_grow_up_to_256_rows():
    """Row tiles grow while partial results fit the allocated rows, up to the rows of a request."""
    config = KernelConfig(16, 64, 4, 3, 2)
    found = {
        q_len: interpreted.interpreted_config(shape(128), config, q_len, 132, 700)[0].block_m
        for q_len in (1, 16, 17, 33, 1000)
    }
    assert found == {1: 16, 16: 16, 17: 32, 33: 64, 1000: 256}
    assert interpreted.interpreted_config(shape(128), config, 1000, 1, 700)[0].block_m == 256
    # Two splits of 1024 rows need no more partial rows than were allocated, so row tiles grow to 256.
    assert interpreted.interpreted_config(shape(128), config, 1024, 2, 700)[0].block_m == 256
    # 1000 rows are 63 tiles of 16 rows. 32 tiles of 32 rows would exceed the allocation by 16 rows.
    assert interpreted.interpreted_config(shape(128), config, 1000, 2, 700)[0].block_m == 16

    ragged, one = interpreted.interpreted_prefill_config(shape(128), config, 700, 1)
    assert (ragged.block_m, ragged.block_n, one) == (256, 256, 1)
    assert interpreted.interpreted_prefill_config(shape(128), replace(config, block_m=512), 700, 1)[0].block_m == 512
    assert interpreted.interpreted_prefill_config(shape(128, page_size=64), config, 9, 1)[0].block_n == 64
    # Two splits of 256 rows fit into the partial rows allocated for 32 splits of 16 rows, but not into those for 31.
    for num_splits, rows in ((32, 256), (31, 16)):
        ragged, few = interpreted.interpreted_prefill_config(shape(128), config, 700, num_splits)
        assert (ragged.block_m, few) == (rows, 2)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_powers_of_two(n, power):
    """next_power_of_two returns the smallest power of two that is at least n."""
    assert common.next_power_of_two(n) == power
