"""The comparison of latent rows with other libraries, on a CPU without graphs."""

from __future__ import annotations

import argparse
import json

import pytest
import torch

from benchmarks.attention import latent_cases, latent_compare


@pytest.fixture
def no_graphs(monkeypatch):
    """Replace graphs by one call each, and their times by a microsecond."""
    monkeypatch.setattr(latent_compare, "captured", lambda calls: calls[0]())
    monkeypatch.setattr(latent_compare, "replay_time", lambda graph, replays: 1.0)
    monkeypatch.setattr(latent_compare, "store_kernels", lambda specs, progress: len(specs))
    monkeypatch.setattr(latent_cases, "COLD_BYTES", 1)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def given(path, **fields) -> argparse.Namespace:
    """Return the command line's values for small cases."""
    usual = {
        "groups": ["3/1,9/16"], "case": ["2x20"], "parts": "128+32", "kv_dtype": "bfloat16", "rounds": 1, "replays": 1,
        "seconds": 60.0, "peers": ["flashmla"], "json": str(path),
    }  # fmt: skip
    return argparse.Namespace(**usual | fields)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "float8_e4m3fn"])
def test_rows_of_a_decode_and_a_tree(no_graphs, tmp_path, kv_dtype):
    """Each case has a row with its name, shape, exactness and floor; an absent peer has none."""
    path = tmp_path / "rows.json"
    latent_compare.compare(given(path, kv_dtype=kv_dtype))
    rows = json.loads(path.read_text())
    assert [one["case"] for one in rows] == ["decode-2x20", "verify9-2x20"]
    for one in rows:
        assert (one["backend"], one["heads"], one["value_dim"], one["rest_dim"]) == ("cuda_triton", 3, 128, 32)
        assert one["exact"] and 0 < one["error"] < latent_compare.MAX_ERROR and one["us"] == 1.0
        assert one["page_size"] == 16 and one["kv_dtype"] == kv_dtype and one["floor_us"] >= 0


def test_a_tree_is_not_a_chain():
    """The error of a tree against a chain's visibility is large, so a wrong mask is not called exact."""
    timed = latent_cases.Timed(latent_cases.Case(3, 2, 20, 9, 16, 128, 32))
    out = timed.own_calls()[0]()
    assert timed.error_of(out) < latent_compare.MAX_ERROR < timed.error_of(out, chain=True)


def test_floors_count_rows_of_their_dtype():
    """Few rows are bound by bytes, which e4m3 nearly halves; many rows are bound by products."""
    wide, narrow = (latent_cases.Case(16, 64, 4096, 1, kv_dtype=kv) for kv in ("bfloat16", "float8_e4m3fn"))
    assert max(wide.floors) == wide.floors[0] and 1.9 < wide.floors[0] / narrow.floors[0] < 2
    many = latent_cases.Case(128, 64, 4096, 8)
    assert max(many.floors) == many.floors[1]
