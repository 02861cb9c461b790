"""The plan of the SGLang benchmark: what it starts together fits together, and what it compares is comparable."""

from __future__ import annotations

import pytest

from benchmarks.sglang.cases import SERVERS, WAVES, Server
from benchmarks.sglang.models import REAL

H200 = 150e9
BESIDES_KV = 8e9
"""Bytes of a server but for its KV: a layer's weights, embedding and output, the CUDA context, graphs, activations.
Eight servers, KV and all, held 61e9 of an H200."""


def _bytes(server: Server) -> float:
    head_dim = REAL["hidden_size"] // REAL["num_attention_heads"]
    token = 2 * 2 * 2 * REAL["num_key_value_heads"] * head_dim  # in bytes: of all the target's layers, and of the head
    return server.tokens * token + BESIDES_KV


@pytest.mark.parametrize("wave", WAVES)
def test_a_wave_fits_into_one_gpu(wave: tuple[Server, ...]) -> None:
    """Servers that start together hold their KV at once; a server's layers share theirs."""
    assert sum(map(_bytes, wave)) < 0.97 * H200


def test_every_server_is_measured_once() -> None:
    """Rows are found by their server's place in the list."""
    assert len(set(SERVERS)) == len(SERVERS)


def test_every_peer_has_draftmark_beside_it() -> None:
    """At the same case, page size and points."""
    ours = {(server.case, server.points) for server in SERVERS if server.backend == "draftmark"}
    assert {(server.case, server.points) for server in SERVERS} == ours
