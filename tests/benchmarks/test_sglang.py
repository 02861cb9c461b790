"""Tests of the SGLang benchmark: the list of servers to measure, the record, and the tables made from the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sglang.cases import SERVERS, WAVES, Server
from benchmarks.sglang.guessable_latent import write_latent
from benchmarks.sglang.models import REAL
from benchmarks.sglang.profiles import is_attention, shares
from benchmarks.sglang.tables import PAGE, RECORD, bound, compared, page, rate, rounds, summary, tables, with_run
from benchmarks.spans import covered

H200 = 150e9
BESIDES_KV = 8e9
"""Bytes of a server except its KV: a layer's weights, embedding and output, the CUDA context, graphs, activations.
Eight servers, KV and all, held 61e9 of an H200."""


def _bytes(server: Server) -> float:
    head_dim = REAL["hidden_size"] // REAL["num_attention_heads"]
    # bytes per token of two KV buffers: one that all target layers share, and the draft head's
    token = 2 * 2 * 2 * REAL["num_key_value_heads"] * head_dim
    return server.tokens * token + BESIDES_KV


@pytest.mark.parametrize("wave", WAVES)
def test_wave_fits_into_one_gpu(wave: tuple[Server, ...]) -> None:
    """The servers of a wave (started together on one GPU) fit into its memory with all their KV."""
    assert sum(map(_bytes, wave)) < 0.97 * H200


def test_every_server_is_measured_once() -> None:
    """No server is in the list twice."""
    assert len(set(SERVERS)) == len(SERVERS)


def test_every_peer_has_a_draftmark_server() -> None:
    """Every SGLang backend's server has a draftmark server with the same case and points (batch and prompt sizes)."""
    ours = {(server.case, server.points) for server in SERVERS if server.backend == "draftmark"}
    assert {(server.case, server.points) for server in SERVERS} == ours


def test_recorded_row_is_in_the_plan() -> None:
    """Every recorded row has a server in the list that measures its case and point."""
    planned = {(one.case.name, one.case.page_size, one.backend): one for one in SERVERS}
    for row in json.loads(RECORD.read_text())["rows"]:
        name, point = row["case"].split()
        server = planned[name, row["page_size"], row["backend"]]
        assert point == f"{row['num_reqs']}x{row['prompt_len']}" and row["num_gpus"] == 1
        assert (row["speculate"], row["accept_len"]) == (server.case.speculate, server.case.accept)
        assert row["phase"] in (("verify",) if server.case.speculate != "none" else ("decode", "prefill"))
        assert row["tokens_per_s"] > 0


def test_record_describes_its_runs() -> None:
    """Each run has device, versions, commit, other load and missing cases; its counts of texts add up to the total."""
    record = json.loads(RECORD.read_text())
    runs = record["runs"]
    for run in runs.values():
        assert run["versions"].keys() == {"torch", "sglang"}
        assert all(run[name] for name in ("device", "commit", "date", "how", "beside", "not_measured"))
    assert record["model"] and {row.get("run", "") for row in record["rows"] + record["profiles"]} <= runs.keys()
    assert all(one["equal"] + len(one["parted"]) == one["texts"] for one in record["equality"])


def test_page_shows_the_record() -> None:
    """docs/sglang.md has the summary that `python -m benchmarks.sglang.tables` writes."""
    text = PAGE.read_text()
    assert page(text, json.loads(RECORD.read_text())) == text


def test_peer_is_the_fastest_of_its_kind() -> None:
    """Our fastest row is compared with the fastest other row, at any page size; the table lists slower rows too."""
    row = dict(phase="verify", case="tree(4,4,16) 1x1024", speculate="tree", num_reqs=1, prompt_len=1024)
    rates = {("draftmark", 1): [90.0], ("draftmark", 64): [100.0], ("fa3", 64): [40.0, 50.0], ("triton", 1): [45.0]}
    rows = [
        row | dict(backend=backend, page_size=size, tokens_per_s=rate)
        for (backend, size), measured in rates.items()
        for rate in measured
    ]
    ours, peer, others = compared(rows)[0]
    assert (ours["tokens_per_s"], peer["tokens_per_s"]) == (100.0, 50.0)
    assert [one["tokens_per_s"] for one in others] == [90.0, 45.0]
    line = "| 1 × 1k | 100 (p64) | FA3 50 (p64) | 2.00 | – | draftmark 90 (p1), Triton 45 (p1) |"
    assert line in tables(dict(rows=rows))


def test_one_long_round_does_not_count() -> None:
    """If one decoding round is much longer than the others, the rate comes from the median round and is marked *."""
    row = dict(phase="verify", case="tree(4,4,16) 1x1024", speculate="tree", num_reqs=1, prompt_len=1024, page_size=64)
    row |= dict(backend="fa3", accept_len=4, median_round_us=10_000.0)
    even, odd = row | dict(longest_round_us=13_900.0), row | dict(longest_round_us=900_000.0)
    assert rate(even | dict(tokens_per_s=399.0)) == 399.0
    assert rate(odd | dict(tokens_per_s=97.0)) == 400.0
    assert "FA3 400* (p64)" in tables(dict(rows=[odd | dict(tokens_per_s=97.0)]))


def test_rows_of_two_runs_have_separate_tables() -> None:
    """Rows of two runs have separate tables; a new run replaces the run with the same name."""
    row = dict(phase="decode", case="none 1x1024", speculate="none", num_reqs=1, prompt_len=1024, page_size=64)
    run = dict(device="H", torch="t", sglang="s", not_measured=[])
    measured = (("draftmark", 9.0), ("fa3", 8.0), ("fa3", 3.0))
    files = [run | dict(rows=[row | dict(backend=name, tokens_per_s=speed)]) for name, speed in measured]
    record = with_run({}, "one", files[0], dict(about="the first"))
    record = with_run(with_run(record, "two", files[1], dict(about="x")), "two", files[2], dict(about="the second"))
    text = tables(record)
    assert text.index("the first") < text.index("| 1 × 1k | 9 (p64) | – | – | – |  |")
    assert text.index("the second") < text.index("| 1 × 1k | – | FA3 3 (p64) | – | – |  |")


def test_overlapping_kernels_count_once() -> None:
    """The share of attention is the time in which only attention kernels ran, not the sum of their times."""
    assert covered([(0, 4), (2, 5), (7, 8)]) == 6
    kernels = [("attend_decode_verify", (0.0, 4.0)), ("combine_splits", (2.0, 5.0)), ("nvjet_sm90_tst", (4.5, 9.0))]
    assert shares(kernels) == (9.0, 4.5)


@pytest.mark.parametrize("record", [json.loads(RECORD.read_text())])
def test_attention_kernels_are_recognised(record: dict[str, Any]) -> None:
    """Each recorded round has attention kernels; matrix products, norms and sampling kernels do not count as such."""
    for one in record["profiles"]:
        names = [name for name, _, _ in one["kernels"]]
        assert sum(map(is_attention, names)) >= 2, one["backend"]
        others = ("nvjet", "splitKreduce", "RMSNorm", "rope", "act_and_mul", "SoftMax", "TopK", "copy_all_layer_kv")
        assert not [name for name in names if is_attention(name) and any(other in name for other in others)]


def test_bound_is_the_round_without_attention() -> None:
    """A row has an upper bound (its rate without attention) only if that row was profiled."""
    row = dict(phase="verify", case="tree(4,4,16) 1x1024", backend="draftmark", page_size=1, speculate="tree")
    row |= dict(num_reqs=1, prompt_len=1024, tokens_per_s=400.0, median_round_us=10_000.0)
    profile = dict(case=row["case"], backend="draftmark", page_size=1, busy_us=9_000.0, attention_us=2_000.0)
    assert bound(row, [profile]) == 500.0
    assert bound(row | dict(page_size=64), [profile]) is None
    peer = row | dict(backend="fa3", tokens_per_s=320.0)
    record = dict(rows=[row, peer], profiles=[profile])
    assert "| 1 × 1k | 400 (p1) | FA3 320 (p1) | 1.25 | 1.56 |  |" in tables(record)
    assert "| tree(4,4,16) 1x1024 | draftmark (p1) | 10,000 | 9,000 | 2,000 | 7,000 | 1,000 |" in rounds(record)


def test_prefill_does_not_hide_a_round() -> None:
    """A prefill row with the case name of a decode row does not replace it: only the decode row has rounds."""
    row = dict(phase="decode", case="none 1x1024", backend="draftmark", page_size=64, median_round_us=5_000.0)
    profile = dict(case=row["case"], backend="draftmark", page_size=64, busy_us=4_900.0, attention_us=300.0)
    record = dict(rows=[row, row | dict(phase="prefill")], profiles=[profile])
    assert "| none 1x1024 | draftmark (p64) | 5,000 | 4,900 | 300 | 4,600 | 100 |" in rounds(record)


def test_point_without_a_peer_is_shown() -> None:
    """If only draftmark ran at a point, the table has the row without a ratio."""
    row = dict(phase="verify", case="ngram(16) 1x1024", backend="draftmark", page_size=1, speculate="ngram")
    row |= dict(num_reqs=1, prompt_len=1024, tokens_per_s=400.0)
    text = tables(dict(rows=[row]))
    assert "**n-gram tree (16)**" in text and "| 1 × 1k | 400 (p1) | – | – | – |  |" in text


def test_two_runs_share_no_ratio() -> None:
    """The summary compares only rows of one run; if only one side ran at a point, there is no ratio."""
    row = dict(phase="verify", case="tree(4,4,16) 1x1024", speculate="tree", num_reqs=1, prompt_len=1024, page_size=1)
    ours, peer = (row | dict(backend=name) for name in ("draftmark", "fa3"))
    rows = [ours | dict(run="one", tokens_per_s=12.0), peer | dict(run="one", tokens_per_s=10.0)]
    rows += [ours | dict(run="two", tokens_per_s=99.0)]
    runs = dict(one={}, two={})
    text = summary(dict(runs=runs, rows=rows, profiles=[]))
    assert text.splitlines()[2:] == ["| tree | 1 | FA3 | 1 | 1.20 | 1.20 | 1.20 |"]
    wide = [one | dict(case="tree(8,4,32) 1x1024", tokens_per_s=20.0 - one["tokens_per_s"]) for one in rows[:2]]
    text = summary(dict(runs=runs, rows=rows + wide, profiles=[]))
    assert text.splitlines()[2:] == ["| tree | 1 | FA3 | 2 | 0.80 | 1.00 | 1.20 |"], "trees of all shapes are one line"


def test_tokens_that_the_exact_model_does_not_choose_are_counted() -> None:
    """A token counts unless its fp32 logit is the largest, or as near to it as bfloat16's error."""
    torch = pytest.importorskip("torch")
    texts = pytest.importorskip("benchmarks.sglang.texts")

    class Model:
        device = "cpu"

        def __init__(self, error: float) -> None:
            logits = torch.tensor([[0.0, 3.0, 1.0, 2.95], [9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 5.0, 4.0], [0.0] * 4])
            self.logits = (logits + error * torch.tensor([0.0, 0.0, 0.0, 1.0]))[None]

        def __call__(self, ids: Any) -> Any:
            return self

    models = [Model(0.0), Model(0.1)]
    assert texts._off(models, [7], [1, 0, 2]) == []
    assert texts._off(models, [7], [3, 0, 2]) == [], "a near tie"
    assert texts._off(models, [7], [2, 0, 3]) == [0, 2]


@pytest.mark.long
def test_transformers_reads_every_weight_of_the_latent_model(tmp_path: Path) -> None:
    """transformers' DeepSeek V3 finds all its weights, and leaves only those of the MTP layer."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    folder = write_latent(tmp_path / "target", "bfloat16")
    model, found = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not found["missing_keys"] and not found["mismatched_keys"]
    assert found["unexpected_keys"] and all(name.startswith("model.layers.4.") for name in found["unexpected_keys"])
    ids = torch.arange(3, 40)[None]
    assert len(set(model(ids).logits[0].argmax(-1).tolist())) > 20, "the next token depends on the last one"
