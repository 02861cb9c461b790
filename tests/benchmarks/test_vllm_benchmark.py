"""Tests of vLLM's benchmark: plans, rows, and runs that resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.runs import resumed
from benchmarks.vllm.engines import Engine, head
from benchmarks.vllm.engines import model as model_of
from benchmarks.vllm.plan import KEPT, Plan, alike, asked, same
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.throughput import Case
from tests.benchmarks.small_cases import HEAD

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vllm"
PLANS = sorted(FOLDER.glob("h[12]00-*.json"))


@pytest.mark.parametrize("plan", PLANS, ids=lambda path: path.stem)
def test_plan_has_valid_engines_and_cases(plan: Path) -> None:
    """A plan's entries have known fields, its timed engines have equally many processes, and KV fits every case."""
    read = json.loads(plan.read_text())
    timed, compared = read.get("throughput", []), read.get("equality", []) + read.get("drafting", [])
    processes, once = (Counter(json.dumps(one, sort_keys=True) for one in of) for of in (timed, compared))
    assert processes + once and len(set(processes.values())) <= 1 and set(once.values()) <= {1}
    cases = [Case(**one) for phase in read.get("cases", {}).values() for one in phase]
    for one in (Engine(**one) for one in read.get("throughput", [])):
        shape, rows = SHAPES[one.shape], [case.batch * (case.context + case.new + 128) + case.beside for case in cases]
        token = (4 if one.kv_dtype == "auto" else 2) * shape["num_key_value_heads"] * shape["head_dim"] // one.num_gpus
        layers = shape["num_hidden_layers"] + (one.drafter == "eagle3" and one.drafts > 0)
        assert one.kv_bytes and one.kv_bytes >= max(rows, default=0) * token * layers, one


def test_plans_of_one_gpu_have_every_kind_of_row() -> None:
    """The plans compare our backends with vLLM's in decode, verify and prefill, with two page sizes and two drafters.

    Cases have 1 to 256 requests and 1k to 32k tokens. A CUDA graph is captured for the row count of uneven cases.
    """
    plans = [json.loads((FOLDER / f"{name}.json").read_text()) for name in ("h200-plan", "h200-ngram-plan")]
    engines = [Engine(**one) for plan in plans for one in plan["throughput"]]
    kinds = {(one.backend, one.page_size, one.drafter if one.drafts else "") for one in engines}
    ours, theirs = "CUSTOM:cuda_triton", "FLASH_ATTN"
    both = {(name, page, drafter) for name in (ours, theirs) for page in (16, 64) for drafter in ("", "eagle3")}
    assert kinds >= both | {(name, page, "ngram") for name in (ours, theirs) for page in (16, 64)}
    others = {"TRITON_ATTN", "FLASHINFER", "CUSTOM:cuda_trtllm", "CUSTOM:cuda_flashinfer"}
    assert {one.backend for one in engines} == {ours, theirs} | others
    phases = ("decode", "verify", "prefill")
    cases = {name: [Case(**one) for plan in plans for one in plan["cases"].get(name, ())] for name in phases}
    for phase, names in {"decode": set(), "verify": {"64x1k-uneven", "16x1k-uneven"}}.items():
        every = {"1x1k", "16x1k", "64x1k", "256x1k", "1x8k", "16x8k", "64x8k", "8x32k", "1x32k"}
        assert {case.name for case in cases[phase]} == every | names
    for engine in engines:
        for case in (one for one in cases["verify"] if one.uneven and engine.drafter == "ngram" and engine.drafts):
            assert case.batch // 2 * (2 + engine.drafts) in engine.also_captured
        assert set(engine.only) <= {case.name for given in cases.values() for case in given}


def test_processes_of_one_engine_are_one_row() -> None:
    """Equal engines of a plan form one group, whatever their order; engines with other drafts or pages do not."""
    usual = {"shape": "small-shape", "backend": "A", "page_size": 16}
    each: list[dict[str, Any]] = [{}, {"backend": "B"}, {"backend": "B"}, {}, {"drafts": 4}, {"page_size": 64}]
    engines = [Engine(**{**usual, **one}) for one in each]
    assert alike(engines, [0, 1, 2, 3, 4, 5]) == [[0, 3], [1, 2], [4], [5]]
    assert alike(engines, [1, 3, 5]) == [[1], [3], [5]]


def test_uneven_steps_need_ngram_drafts() -> None:
    """An engine runs an uneven case only with n-gram drafts, and only if its list of cases permits the case."""
    case, usual = Case(64, 1024, 4, uneven=True), {"shape": "small-shape", "backend": "A", "page_size": 16}
    assert case.asked_of(Engine(**usual, drafts=4))
    assert not case.asked_of(Engine(**usual)) and not case.asked_of(Engine(**usual, drafts=4, drafter="eagle3"))
    assert not case.asked_of(Engine(**usual, drafts=4, only=("64x1k",)))
    assert Case(64, 1024, 4).asked_of(Engine(**usual, drafts=4, only=("64x1k",)))


def test_head_has_fewer_tokens_with_its_own_output(tmp_path: Path) -> None:
    """A draft head that shares weights has its own output rows for 128 tokens; else it has the target's 512 tokens."""
    for shared, tokens in ((True, 128), (False, 512)):
        config = json.loads((head(tmp_path, Engine(**HEAD, shared=shared)) / "config.json").read_text())
        assert (config["draft_vocab_size"], config["vocab_size"], config["num_hidden_layers"]) == (tokens, 512, 1)


def test_shape_is_a_llama_by_default(tmp_path: Path) -> None:
    """A model shape is a Llama unless it names Gemma 2 (a window in every second layer); a seed sets the weights."""
    pytest.importorskip("transformers")
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    read = {}
    for shape, random in (("small-windows-shape", False), ("small-shape", True)):
        engine = Engine(shape, backend="A", page_size=16, random_weights=random)
        read[shape] = json.loads((model_of(tmp_path, engine) / "config.json").read_text())
        assert read[shape]["architectures"] == list(engine.architectures)
    windows = read["small-windows-shape"]
    assert windows["architectures"] == ["Gemma2ForCausalLM"] and windows["sliding_window"] == 64
    assert windows["layer_types"] == 2 * ["sliding_attention", "full_attention"]
    assert read["small-shape"]["architectures"] == ["LlamaForCausalLM"] and "sliding_window" not in read["small-shape"]
    kept = load_file(model_of(tmp_path, Engine("small-shape", backend="A", page_size=16)) / "model.safetensors")
    torch.manual_seed(0)
    config = LlamaConfig.from_pretrained(tmp_path / "small-shape-bfloat16")
    config.dtype = torch.float32
    for name, tensor in LlamaForCausalLM(config).state_dict().items():
        assert torch.equal(kept[name], tensor.to(torch.bfloat16)), name


def a_plan(folder: Path, **more: Any) -> Plan:
    """Return a plan with two engines and three cases; `more` sets fields of the engines."""
    one = {"shape": "Llama-3-8B-shape", "page_size": 16, "kv_bytes": 1 << 34, "shared": True, **more}
    cases = {
        "decode": [{"batch": 1, "context": 1024, "steps": 8}, {"batch": 64, "context": 8192, "steps": 8}],
        "prefill": [{"batch": 1, "context": 1024}],
    }
    read = {"throughput": [{**one, "backend": "A"}, {**one, "backend": "B", "drafts": 4}], "cases": cases}
    (folder / "plan.json").write_text(json.dumps(read))
    return Plan(folder / "plan.json", kv_bytes=1 << 32)


def test_plan_runs_the_first_case_of_each_phase_first(tmp_path: Path) -> None:
    """A plan runs the first case of each phase first, only cases that fit the KV pages, and only one page size."""
    plan = a_plan(tmp_path)
    names = [[f"{phase} {case.name}" for phase, case in beside] for beside in plan.rounds()]
    assert names == [["decode 1x1k", "prefill 1x1k"], ["decode 64x8k"]]
    assert [one.kv_bytes for one in plan.timed] == [1 << 32] * 2
    small, large = plan.cases["decode"]
    assert asked("decode", small, plan.timed[0]) and not asked("decode", large, plan.timed[0])
    assert not asked("decode", small, plan.timed[1])
    assert [one.backend for one in Plan(tmp_path / "plan.json", engines=1).timed] == ["A"]
    assert [one.page_size for one in Plan(tmp_path / "plan.json", page_size=64).timed] == [64] * 2


def test_run_resumes_on_the_same_device_and_commit(tmp_path: Path) -> None:
    """A resumed run keeps its rows and retries failed engines; on another device or commit it is refused."""
    head = {"device": "H", "commit": "c", "rows": [], "failed": [], "equality": [], "drafting": [], "profiles": []}
    engine = a_plan(tmp_path).timed[0]
    row = {"phase": "decode", "case": "1x1k", "backend": "A", "page_size": 16}
    (tmp_path / "before.json").write_text(json.dumps({**head, "rows": [row], "failed": [{"why": "time"}]}))
    found = resumed(head, tmp_path / "before.json", KEPT)
    assert found["rows"] == [row] and found["failed"] == []
    assert same(row, "decode", Case(1, 1024, 8), engine) and not same(row, "decode", Case(2, 1024, 8), engine)
    assert resumed(head, None, KEPT) == head
    with pytest.raises(SystemExit, match="on H at commit c, but this run is on H at d"):
        resumed({**head, "commit": "d"}, tmp_path / "before.json", KEPT)
