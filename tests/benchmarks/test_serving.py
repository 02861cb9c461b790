"""Tests of the serving benchmark: plans, runs, processes and tables."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import tables
from benchmarks.serving.__main__ import Run, Served
from benchmarks.serving.compilations import HOOK
from benchmarks.serving.plan import read
from benchmarks.serving.processes import Process, free_port, wait_for
from benchmarks.serving.servers import Server, capacity, engine_of
from benchmarks.vllm.__main__ import elements
from benchmarks.vllm.throughput import token_bytes
from tests.benchmarks.small_cases import WORKLOAD

FOLDER = Path(__file__).parents[2] / "benchmarks" / "serving"
PLANS = sorted(FOLDER.glob("*-plan.json"))
WHOLE_PROMPTS = {"h200-vllm-newest-plan.json": ("burst", "chat")}
"""Workloads with prompts shorter than a chunk only, by plan. Every other workload must cut prompts in chunks."""
H200 = 150e9
BESIDES = 5e9
"""Bytes of a server except weights and KV: the CUDA context, graphs and activations."""


@pytest.mark.parametrize(("installed", "sampler"), [(None, "0"), (object(), None)])
def test_vllm_samples_without_flashinfer_where_it_is_absent(tmp_path, monkeypatch, installed, sampler):
    """vLLM on a GPU imports FlashInfer's sampler at its start, unless a variable says otherwise."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: installed)
    monkeypatch.delenv("VLLM_USE_FLASHINFER_SAMPLER", raising=False)
    made = Server("vllm", "FLASH_ATTN").variables(tmp_path, HOOK)
    assert made.get("VLLM_USE_FLASHINFER_SAMPLER") == sampler


def test_environment_of_a_server_has_no_shared_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that name a cache are replaced or left out, so that a first start finds every cache empty."""
    for name in ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "HF_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "/shared")
    made = Server("vllm", "FLASH_ATTN").variables(tmp_path, HOOK)
    assert "/shared" not in made.values() and "TRITON_CACHE_DIR" not in made
    assert made["PYTHONPATH"].split(os.pathsep)[0] == str(HOOK)


def test_real_sampler_is_not_simulated(tmp_path: Path) -> None:
    """Without an acceptance rate both engines keep their real sampler."""
    theirs, other = (Server(one, "a", "eagle3", shape="small-shape", acceptance=None) for one in ("vllm", "sglang"))
    assert "synthetic_acceptance_rates" not in values(theirs.command(tmp_path, 8000))["--speculative-config"]
    assert not [name for name in other.variables(tmp_path, HOOK) if name.startswith("SGLANG_SIMULATE")]


def values(command: list[str]) -> dict[str, str]:
    """Return the options with a value of a command line."""
    return {name: value for name, value in pairwise(command) if name.startswith("--")}


def test_command_of_a_vllm_server(tmp_path: Path) -> None:
    """A vLLM server gets drafts with synthetic acceptance, the plan's pages and monitor, and default graphs."""
    server = Server("vllm", "CUSTOM:cuda_triton", "eagle3", shape="small-shape", monitor="error")
    found = values(server.command(tmp_path, 8000))
    drafts = json.loads(found["--speculative-config"])
    assert drafts["method"] == "eagle3" and drafts["attention_backend"] == found["--attention-backend"] == "CUSTOM"
    assert drafts["synthetic_acceptance_rates"][1] == pytest.approx(0.49)
    assert found["--jit-monitor-mode"] == "error" and found["--port"] == "8000" and found["--load-format"] == "dummy"
    assert int(found["--kv-cache-memory-bytes"]) == server.kv_tokens * token_bytes(engine_of(server))
    assert "--compilation-config" not in found and "--skip-tokenizer-init" not in server.command(tmp_path, 8000)


@pytest.mark.parametrize(("drafter", "algorithm", "drafts"), [("eagle3", "EAGLE3", "5"), ("ngram", "NGRAM", "4")])
def test_command_of_an_sglang_server(tmp_path: Path, drafter: str, algorithm: str, drafts: str) -> None:
    """An SGLang server gets a chain of four drafts after the verified token, or an n-gram tree of four nodes."""
    server = Server("sglang", "fa3", drafter, shape="small-shape")
    found = values(server.command(tmp_path, 8000))
    assert found["--speculative-algorithm"] == algorithm and found["--speculative-num-draft-tokens"] == drafts
    assert found["--max-total-tokens"] == str(server.kv_tokens)
    assert server.variables(tmp_path, HOOK)["SGLANG_SIMULATE_ACC_LEN"] == "2.77"


def test_compiler_of_ngram_servers_is_a_program(tmp_path: Path) -> None:
    """SGLang runs the compiler of its n-gram servers without a shell, so it is one file. Other servers keep theirs."""
    assert os.access(Server("sglang", "fa3", "ngram").variables(tmp_path, HOOK)["CXX"], os.X_OK)
    assert Server("sglang", "fa3", "eagle3").variables(tmp_path, HOOK).get("CXX") == os.environ.get("CXX")


def test_command_of_a_server_with_an_mtp_tree(tmp_path: Path) -> None:
    """A tree of the model's own MTP layer has no draft model; with a prefix cache SGLang sizes KV and states."""
    pytest.importorskip("transformers.models.qwen3_next")
    tree = {"topk": 4, "drafts": 3, "nodes": 16, "prefix_cache": True, "kv_tokens": 0}
    found = values(Server("sglang", "draftmark", "mtp", shape="Qwen3-Next-shape", **tree).command(tmp_path, 8000))
    assert found["--speculative-algorithm"] == "EAGLE" and "--speculative-draft-model-path" not in found
    shape = [found[f"--speculative-{name}"] for name in ("eagle-topk", "num-steps", "num-draft-tokens")]
    assert shape == ["4", "3", "16"]
    assert "--max-total-tokens" not in found and "--disable-radix-cache" not in found
    config = json.loads((Path(found["--model-path"]) / "config.json").read_text())
    assert config["architectures"] == ["Qwen3NextForCausalLM"] and len(config["layer_types"]) == 24


def test_capacity_of_a_hybrid_model() -> None:
    """Slots of recurrent state and requests come from SGLang's log; other models have no such slots."""
    log = "x] Mamba Cache is allocated. max_mamba_cache_size: 329, conv_state\nmax_running_requests=65, context_len"
    assert capacity(log) == {"slots": 329, "requests": 65}
    assert capacity("max_running_requests=65, ") == {}


def test_tokenizer_names_every_token(tmp_path: Path) -> None:
    """Token n of a model's tokenizer is the word tN, in both directions."""
    from transformers import AutoTokenizer

    model = tmp_path / "small-shape-bfloat16"
    Server("vllm", "FLASH_ATTN", shape="small-shape").command(tmp_path, 8000)
    tokenizer = AutoTokenizer.from_pretrained(model)
    assert tokenizer.decode([3, 511]) == "t3 t511" and tokenizer("t511 t3")["input_ids"] == [511, 3]


@pytest.mark.parametrize("field", ["engine", "drafter", "monitor"])
def test_server_rejects_an_unknown_choice(field: str) -> None:
    """An unknown value of a field is an error that names the field and the choices."""
    with pytest.raises(ValueError, match=f"{field} is 'no'; write one of"):
        Server(**{"engine": "vllm", "backend": "FLASH_ATTN"} | {field: "no"})


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plan_can_run(path: Path) -> None:
    """Every plan has a server of draftmark and one of the engine; requests fit a server, and a wave fits an H200."""
    plan = read(path)
    assert {one.is_ours for wave in plan.waves for one in wave} == {True, False}
    for server in (one for wave in plan.waves for one in wave):
        own = plan.workloads[: server.workloads or None]
        assert all(one.prompt[1] + one.new[1] + server.drafts < server.max_model_len for one in own)
        assert all(one.at_once <= server.max_num_seqs for one in own)
        long = [one for one in own if one.name not in WHOLE_PROMPTS.get(path.name, ())]
        assert long and all(one.prompt[1] > server.max_num_batched_tokens for one in long), "no prompt is cut in chunks"
    for wave in plan.waves:
        engines = [engine_of(one) for one in wave]
        kv = sum(one.kv_tokens * token_bytes(engine) for one, engine in zip(wave, engines, strict=True))
        assert sum(2 * elements(one) + BESIDES for one in engines) + kv < H200


def test_servers_alternate_and_restarted_ones_start_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers with restart start one by one, or as a pair, before and after the passes; workloads alternate servers."""
    begun: list[list[str]] = []
    passes: list[tuple[str, str, str]] = []

    def started(run: Run, served: list[Any], which: str) -> list[Any]:
        begun.append([which, *(one.server.backend for one in served)])
        for one in served:
            one.process = one
        return served

    def run_pass(run: Run, one: Any, workload: Any, name: str) -> None:
        passes.append((one.server.backend, workload.name, name))

    monkeypatch.setattr(Run, "_started_together", started)
    monkeypatch.setattr(Run, "_pass", run_pass)
    monkeypatch.setattr(Run, "_read_packages", lambda run: None)
    monkeypatch.setattr("benchmarks.serving.__main__.Served.end", lambda one: None)
    wave = [
        {"backend": "A", "restart": True},
        {"backend": "B", "restart": True, "again": 1},
        {"backend": "C", "workloads": 1},
    ]
    workloads = [{"name": "x", "seed": 1}, {"name": "y", "seed": 2}]
    (tmp_path / "plan.json").write_text(json.dumps({"engine": "vllm", "workloads": workloads, "waves": [wave]}))
    Run(read(tmp_path / "plan.json"), tmp_path / "out.json", tmp_path / "folder", 1e6).run([0])
    assert begun == [
        ["first", "A"], ["first", "B"], ["first", "C"], ["second", "A"], ["second", "B"],
    ]  # fmt: skip
    turns = [("A", "x"), ("B", "x"), ("C", "x"), ("A", "y"), ("B", "y")]
    expected = [(*one, name) for one in turns for name in ("cold", "again")]
    expected.remove(("B", "y", "again"))
    assert passes == [*expected, ("A", "x", "restarted"), ("B", "x", "restarted")]

    begun.clear()
    plan = replace(read(tmp_path / "plan.json"), paired=True)
    Run(plan, tmp_path / "out.json", tmp_path / "folder of a pair", 1e6).run([0])
    assert begun == [["first", "A", "B"], ["first", "C"], ["second", "A", "B"]]


def test_run_without_time_names_what_did_not_run(tmp_path: Path) -> None:
    """A run without time starts nothing; its record has device, commit, versions, and a reason for each server."""
    plan = read(FOLDER / "cpu-vllm-plan.json")
    first = replace(plan.waves[0][0], needs="no_such_package")
    plan = replace(plan, waves=((first,), *plan.waves[1:]))
    Run(plan, tmp_path / "out.json", tmp_path / "folder", 0).run([0, 1])
    record = json.loads((tmp_path / "out.json").read_text())
    assert record["rows"] == record["starts"] == record["failed"] == []
    assert [one["why"] for one in record["not_run"]] == [
        "package no_such_package is not installed", "no time left", "no time left",
    ]  # fmt: skip
    assert {"device", "commit", "engine", "schema"} <= set(record) and record["versions"]["torch"] != "absent"
    assert record["workloads"][0] == json.loads(json.dumps(asdict(plan.workloads[0])))


def test_no_run_measures_while_another_starts_servers(tmp_path: Path) -> None:
    """Starts of two runs with one file go on together; a pass waits for the starts and passes of the other."""
    plan = read(FOLDER / "cpu-vllm-plan.json")
    run = Run(plan, tmp_path / "out.json", tmp_path / "folder", 0, turns=tmp_path / "turns")
    with (tmp_path / "turns").open("a") as other:
        with run._turn(fcntl.LOCK_SH):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)
            fcntl.flock(other, fcntl.LOCK_UN)
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with run._turn(), pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_SH | fcntl.LOCK_NB)


SERVES = """
import http.server, sys
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def test_process_is_ready_then_ended(tmp_path: Path) -> None:
    """A server that answers its health check is ready after some seconds, and after its end the process is gone."""
    port = free_port()
    process = Process([sys.executable, "-c", SERVES, str(port)], os.environ, tmp_path / "log", port)
    try:
        assert wait_for({3: process}, 30).keys() == {3}
    finally:
        process.end()
    assert process.state() == "ended"


def test_reason_of_a_failed_start_is_its_error(tmp_path: Path) -> None:
    """A server that ends is not ready. The reason is the first error of its log, without names of folders."""
    (tmp_path / "log").write_text("ValueError: of an earlier start\n")
    error = "(EngineCore pid=7) ERROR 11-29 10:00:00 [core.py:7] RuntimeError: no file /root/x/model.bin"
    code = f"import sys; print('part x is disabled (ImportError: y)'); sys.exit({error!r} + '\\nlater line')"
    process = Process([sys.executable, "-c", code], os.environ, tmp_path / "log", free_port())
    assert wait_for({0: process}, 30) == {} and process.state() == "ended"
    assert process.reason() == error.replace("/root/x", "…")


def a_record() -> dict[str, Any]:
    """Return a record of two backends with n-gram drafts, one of them also under the monitor's error mode."""

    def row(backend: str, which: str, **more: Any) -> dict[str, Any]:
        times = {f"{what}_{name}_ms": 12.0 for what in ("first_token", "between") for name in ("p50", "p99", "worst")}
        about = {"backend": backend, "drafter": "ngram", "page_size": 16, "workload": "a", "pass": which}
        return about | times | {"failed": 0, "tokens_per_s": 1234.5, "compiled": 0, "compile_s": 0.0} | more

    ours, theirs = "CUSTOM:cuda_triton", "FLASH_ATTN"
    start = {"backend": theirs, "drafter": "ngram", "page_size": 16, "start": "first", "alone": True, "seconds": 41.23}
    return {
        "engine": "vllm", "device": "H200", "commit": "0123456789", "versions": {"vllm": "0.26.0"},
        "workloads": [asdict(WORKLOAD)], "starts": [start, {**start, "backend": ours, "alone": False}],
        "rows": [
            row(ours, "cold", compiled=3, compile_s=7.25), row(ours, "again", between_worst_ms=99.96),
            row(theirs, "cold"), row(ours, "cold", monitor_mode="error", workload="a"),
        ],
        "failed": [{"backend": theirs, "drafter": "ngram", "what": "a, again", "why": "RuntimeError: x"}],
        "not_run": [{"backend": "FLASHINFER", "drafter": "none", "what": "all", "why": "no time left"}],
    }  # fmt: skip


def test_table_of_a_record() -> None:
    """A line has both starts, cold and later passes, and the compilations; starts in a group are left out."""
    lines = tables.summary(a_record()).splitlines()
    assert lines[2:4] == [
        "|n-gram|FLASH_ATTN|41.2|–|1,234|–|12.0/12.0|12.0/12.0/12.0|–|0|",
        "|n-gram|`cuda_triton`|–|–|1,234|1,234|12.0/12.0|12.0/12.0/12.0|100.0|3 (7.2 s)|",
    ]
    assert "*H200 · vLLM 0.26.0 · commit 01234567*" in lines
    assert lines[-3:] == [
        "* CUSTOM:cuda_triton, n-gram, `--jit-monitor-mode error`: no compilation in 1 passes.",
        "* FLASH_ATTN, n-gram, a, again: RuntimeError: x",
        "* Not run, no time left: FLASHINFER, no drafts.",
    ]


def test_starts_of_a_pair_are_in_the_table() -> None:
    """Servers that started together by plan are compared, and the text says so."""
    record = a_record()
    for number, start in enumerate(record["starts"]):
        start |= {"alone": False, "paired": True, "seconds": 50.0 + number}
    text = tables.summary(record)
    assert "|FLASH_ATTN|50.0|" in text and "|`cuda_triton`|51.0|" in text
    assert "Servers with start times started together." in text


def test_other_runs_give_the_servers_that_a_record_lacks() -> None:
    """A server of another run has a line if the record's own run lacks it; monitored passes count in every run."""
    record, other = a_record(), a_record()
    other["workloads"] = [{**other["workloads"][0], "name": "b"}]
    for row in other["rows"]:
        row |= {"workload": "b", "tokens_per_s": 77.0}
    more = [{**row, "drafter": "none"} for row in other["rows"] if row["backend"] == "FLASH_ATTN"]
    record["other_runs"] = [{**other, "rows": [*other["rows"], *more]}]
    lines = tables.summary(record).splitlines()
    assert lines[2:4] == tables.summary(a_record()).splitlines()[2:4]
    assert lines[4] == "|none|FLASH_ATTN|–|–|77.0|–|12.0/12.0|12.0/12.0/12.0|–|0|" and not lines[5]
    assert "* CUSTOM:cuda_triton, n-gram, `--jit-monitor-mode error`: no compilation in 2 passes." in lines


def test_table_stands_between_the_marks_of_each_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both engine pages have the marks before their first heading; a page without a record keeps its text."""
    for page in tables.PAGES.values():
        text = page.read_text()
        assert text.index(tables.BEGIN) < text.index(tables.END) < text.index("## Install")
    pages = {engine: tmp_path / f"{engine}.md" for engine in tables.PAGES}
    for page in pages.values():
        page.write_text(f"a\n{tables.BEGIN}\nkept\n{tables.END}\nb\n")
    (tmp_path / "record.json").write_text(json.dumps(a_record()))
    records = {"vllm": tmp_path / "record.json", "sglang": tmp_path / "none.json"}
    monkeypatch.setattr(tables, "PAGES", pages)
    monkeypatch.setattr(tables, "RECORDS", records)
    monkeypatch.setattr(sys, "argv", ["tables"])
    tables.main()
    assert "kept" in pages["sglang"].read_text()
    assert pages["vllm"].read_text() == f"a\n{tables.BEGIN}\n{tables.summary(a_record())}\n{tables.END}\nb\n"


def test_folder_of_a_server_is_its_own(tmp_path: Path) -> None:
    """Two servers of a run have different folders of caches, and both are empty."""
    first, second = (Served(Server("vllm", "FLASH_ATTN"), tmp_path / name, tmp_path) for name in "ab")
    assert first.watch.caches != second.watch.caches
    assert not [one for one in first.watch.caches.rglob("*") if not one.is_dir()]
