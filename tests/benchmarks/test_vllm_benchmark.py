"""Tests of the vLLM benchmark without vLLM or GPU: plans, shared memory, processes, profiles, generated texts."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.runs import resumed
from benchmarks.spans import covered
from benchmarks.vllm import cores, fleet, judged, ranks
from benchmarks.vllm.engines import Engine, head
from benchmarks.vllm.engines import model as model_of
from benchmarks.vllm.equality import compare
from benchmarks.vllm.fleet import _kv_dtype
from benchmarks.vllm.judged import judge
from benchmarks.vllm.memory import HANDLES, Mapped, Memory, make
from benchmarks.vllm.plan import KEPT, Plan, alike, asked, same
from benchmarks.vllm.profile import Functions, OnRanks, profiles
from benchmarks.vllm.ranks import Rank
from benchmarks.vllm.shapes import SHAPES
from benchmarks.vllm.starts import once
from benchmarks.vllm.throughput import Case, _prompts, _row, medians, run, token_bytes

FOLDER = Path(__file__).parents[2] / "benchmarks" / "vllm"
PLANS = sorted(FOLDER.glob("h[12]00-*.json"))
HEAD = {"shape": "small-shape", "backend": "CUSTOM:cuda_triton", "page_size": 16, "drafts": 4, "drafter": "eagle3"}


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


def memory() -> Memory:
    """Return small shared tensors of weights and KV."""
    weights, kv = make(4096, 8192, "cpu")
    return Memory(weights, kv)


def test_two_models_have_equal_weights() -> None:
    """The matrices of both models are equal views of the shared tensor; each model has its own norms, set to ones."""
    held = memory()
    models = [torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)).bfloat16() for _ in range(2)]
    for model in models:
        Memory(held.weights, held.kv).adopt(model)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert (one.data_ptr() == other.data_ptr()) is (one.dim() == 2)
        assert one.dim() == 2 or bool((one == 1).all())
    first, second = models[0][0].weight, models[0][1].weight
    assert second.data_ptr() >= first.data_ptr() + 2 * first.numel() and not torch.equal(first.T, second)


def test_head_is_a_second_model() -> None:
    """A draft head's weights begin at the shared tensor's start; it has own output rows and a token map of zeros."""
    held = memory()
    model = torch.nn.Linear(8, 16, bias=False).bfloat16()
    one = torch.nn.Linear(8, 16, bias=False).bfloat16()
    one.draft_id_to_target_id = torch.nn.Parameter(torch.ones(16, dtype=torch.long), requires_grad=False)
    held.adopt(model)
    held.adopt(one)
    assert one.weight.data_ptr() == model.weight.data_ptr() and one.has_own_lm_head
    assert not one.draft_id_to_target_id.any() and not hasattr(model, "has_own_lm_head")


def test_matrices_use_the_shared_tensor_in_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """In `matrices()`, torch.empty returns shared memory for matrices of its dtype that are large and fit into it."""
    monkeypatch.setattr("benchmarks.vllm.memory.MATRIX", 64)
    held, ours = memory(), {"dtype": torch.bfloat16}
    there = held.weights.data_ptr()
    usual = torch.empty
    with held.matrices():
        assert torch.empty is usual, "torch's compiler would not recognise a replaced function"
        assert torch.empty(8, 16, **ours).data_ptr() == torch.empty((4, 32), **ours).data_ptr() == there
        assert torch.empty(8, 16, **ours).shape == (8, 16)
        others = torch.empty(128, **ours), torch.empty(2, 4, **ours), torch.empty(64, 128, **ours), torch.empty(8, 16)
        assert all(one.data_ptr() != there for one in others)
    assert torch.empty(8, 16, **ours).data_ptr() != there


def test_rank_maps_the_memory_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank maps its device's memory at the first use, after it has selected the device, and only once."""
    handles = [pickle.dumps((torch.full((4,), n), torch.zeros(1))) for n in range(2)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: pytest.fail("the device was read too early"))
    mapped = Mapped(handles)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert mapped.memory().weights.tolist() == [1] * 4 and mapped.memory() is mapped.memory()


def test_kv_uses_the_shared_tensor_in_the_block() -> None:
    """In `pages()`, torch.zeros returns consecutive parts of the shared KV for int8, and zeros for other dtypes."""
    held = memory()
    with held.pages():
        one, other = (torch.zeros(1024, dtype=torch.int8, device="cpu") for _ in range(2))
        rest = torch.zeros(4)
    assert one.data_ptr() == held.kv.data_ptr() and other.data_ptr() == one.data_ptr() + 1024
    assert not rest.any() and bool(one.any())
    assert not torch.zeros(1024, dtype=torch.int8).any()
    with held.pages(), pytest.raises(ValueError, match="the shared KV has 8192 bytes"):
        torch.zeros(8193, dtype=torch.int8, device="cpu")


def test_pages_are_random_in_their_dtype() -> None:
    """KV pages hold random numbers of their own dtype; random bfloat16 bytes, read as e4m3, would often be NaN."""
    for kind in (torch.bfloat16, torch.float8_e4m3fn):
        _, pages = make(8, 8192, "cpu", kind)
        numbers = pages.view(kind).float()
        assert pages.numel() == 8192 and bool(numbers.isfinite().all()) and 0.9 < float(numbers.std()) < 1.1


def test_engines_that_share_pages_have_one_kv_dtype() -> None:
    """Engines that share KV pages but differ in KV dtype raise an error, because pages are random in one dtype."""
    narrow, wide, apart = (
        Engine("small-shape", "A", 16, kv_dtype=kind, shared=shared)
        for kind, shared in (("fp8", True), ("auto", True), ("auto", False))
    )
    assert _kv_dtype([narrow, apart]) == "fp8" and _kv_dtype([wide]) == "auto"
    with pytest.raises(ValueError, match="kv_dtype is auto and fp8; write a plan for each"):
        _kv_dtype([narrow, wide])


def test_row_names_a_kv_dtype_that_differs(tmp_path: Path) -> None:
    """An fp8 engine passes its KV dtype to vLLM, needs half the bytes per token, and has its own rows in the record."""
    usual, narrow = (Engine("small-shape", "A", 16, kv_dtype=kind) for kind in ("auto", "fp8"))
    assert narrow.arguments(tmp_path)["kv_cache_dtype"] == "fp8"
    assert "kv_cache_dtype" not in usual.arguments(tmp_path)
    assert token_bytes(usual) == 2 * token_bytes(narrow)
    case = Case(1, 1024, 4)
    row = _row(case, narrow, 0.0, 1.0, 2.0, 4, 4)
    assert row["kv_dtype"] == "fp8" and same(row, "decode", case, narrow) and not same(row, "decode", case, usual)


class Source:
    """Substitute for Triton's kernel source, with the interface that `compile` needs."""

    def __init__(self, name: str) -> None:
        self.name = name

    def hash(self) -> str:
        """Return the name as the hash."""
        return self.name


def compile_in(folder: Path, name: str, begun: Any, go: Any) -> None:
    """Compile a kernel unless its file exists, and append its name to a file when it was compiled."""

    def compile_kernel(src: Source, target: Any, options: Any) -> None:
        begun.set()
        go.wait()
        if not (folder / src.name).exists():
            with (folder / "compiled").open("a") as f:
                f.write(src.name)
            (folder / src.name).touch()

    once(compile_kernel, folder / "locks")(Source(name), "sm_90", {"num_warps": 4})


def test_one_process_compiles_a_shared_kernel(tmp_path: Path) -> None:
    """If two processes need one kernel, the second waits and reads it from disk; another kernel does not wait."""
    context = multiprocessing.get_context("fork")
    begun, go = [context.Event() for _ in range(3)], context.Event()
    each = [
        context.Process(target=compile_in, args=(tmp_path, name, one, go))
        for name, one in zip("aab", begun, strict=True)
    ]
    for process in each:
        process.start()
    assert begun[2].wait(60)
    while not (begun[0].is_set() or begun[1].is_set()):
        pass
    assert not (begun[0].is_set() and begun[1].is_set())
    go.set()
    for process in each:
        process.join()
    assert sorted((tmp_path / "compiled").read_text()) == ["a", "b"]


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


def serve(engine: Engine, *given: Any) -> None:
    """Act as an engine's process: with drafts it never becomes ready, and with two GPUs it fails."""
    link = given[-1]
    if engine.num_gpus == 2:
        link.send({"failed": "no second device"})
        return
    if not engine.drafts:
        link.send({"start_s": 0.0, "ready_s": 0.0})
    while True:
        link.send(link.recv()(None, engine))


def name_of(llm: Any, engine: Engine) -> str:
    """Return the engine's backend."""
    return engine.backend


def test_ready_engines_do_not_wait_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When time is over, engines that are not ready are ended; those that are ready run in any order."""
    monkeypatch.setattr(fleet, "_serve", serve)
    usual = {"shape": "small-shape", "page_size": 16}
    each = ({"backend": "A"}, {"backend": "B", "drafts": 4}, {"backend": "C", "num_gpus": 2}, {"backend": "D"})
    engines = fleet.Fleet([Engine(**usual, **one) for one in each], tmp_path, name_of, "cpu")
    try:
        assert engines.wait(0, 600) == [0, 3]
        assert engines.failed[1] == "it was not ready in time" and 2 in engines.failed
        assert [engines.ask(number, name_of) for number in (3, 0)] == ["D", "A"]
        assert engines.ask(1, name_of) == {"failed": "it was not ready in time"}
    finally:
        engines.close()


class OneRequest:
    """Substitute for vLLM's engine loop with one request: each step runs a matrix product and adds one token."""

    def __init__(self) -> None:
        self.llm_engine, self._left, self._made, self.name, self.ended = self, 0, 0, "", []

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        """Accept a request."""
        self.name, self._left, self._made = name, sampling.max_tokens, 0

    def abort_request(self, names: list[str]) -> None:
        """End the request."""
        self.ended, self._left = names, 0

    def has_unfinished_requests(self) -> bool:
        """Return True if the request still needs tokens."""
        return self._left > 0

    def step(self) -> list[Any]:
        """Add one token."""
        self._left, self._made = self._left - 1, self._made + 1
        torch.ones(64, 64) @ torch.ones(64, 64)
        return [SimpleNamespace(request_id=self.name, outputs=[SimpleNamespace(token_ids=[0] * self._made)])]


class Serving:
    """Substitute for vLLM's engine loop: a step adds a token to each request; a late request needs more steps."""

    def __init__(self, steps_of_the_late: int) -> None:
        self.llm_engine, self._wait, self._has_begun = self, steps_of_the_late, False
        self._made: dict[str, int] = {}
        self.asked: dict[str, Any] = {}
        self.ended: list[str] = []

    def add_request(self, name: str, prompt: Any, sampling: Any) -> None:
        """Accept a request."""
        self._made[name] = 1 - self._wait if self._has_begun else 0
        self.asked[name] = prompt

    def abort_request(self, names: list[str]) -> None:
        """End the requests."""
        self.ended = names

    def has_unfinished_requests(self) -> bool:
        """Return True always."""
        return True

    def step(self) -> list[Any]:
        """Add one token to each request."""
        self._has_begun, outs = True, []
        for name in self.asked:
            self._made[name] += 1
            if self._made[name] > 0:
                outs.append(
                    SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * self._made[name])])
                )
        return outs


@pytest.mark.parametrize("steps", [0, 3])
def test_profile_covers_the_timed_steps(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile covers only the prefill step or the decode steps; both profilers find one matrix product per step."""
    monkeypatch.setattr(
        "benchmarks.vllm.throughput._sampling", lambda *given: SimpleNamespace(max_tokens=1 + given[0].steps)
    )
    found = profiles(Case(1, 1024, steps), OneRequest(), Engine("small-shape", "CUSTOM:reference", 16))
    calls = {row["name"]: row["calls"] for row in found["host_calls"]}
    functions = [row["calls"] for row in found["host_functions"] if row["name"].endswith(" step")]
    assert (found["steps"], calls["aten::mm"], functions) == (max(1, steps), 1.0, [1.0])
    assert found["torch_ms"] > 0 and found["functions_ms"] > 0
    assert (found["kernels"], found["device_busy_us"]) == ([], 0)  # empty without a GPU


def test_profile_of_ranks_is_the_first_ranks() -> None:
    """Each rank profiles itself when the engine calls it; the profile of the first rank is returned."""
    rank, called = Rank(), []

    def call(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        called.append(method)
        return [getattr(rank, method)(*args)]

    loop = OneRequest()
    loop.collective_rpc = call  # type: ignore[attr-defined]
    watch = OnRanks(Functions, loop)
    watch.begin()
    covered([])
    watch.end()
    functions = [row["name"] for row in watch.said(1)["host_functions"]]
    assert any(name.endswith(" covered") for name in functions)
    assert called == ["watch_begin", "watch_end", "watch_said"]


def test_restarted_rank_finds_the_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At import, a rank registers the shared memory from the file that an environment variable names."""
    kept, found = tmp_path / "handles", []
    kept.write_bytes(pickle.dumps([pickle.dumps((torch.ones(4), torch.zeros(1)))]))
    monkeypatch.setenv(HANDLES, str(kept))
    monkeypatch.setattr("benchmarks.vllm.memory.register", found.append)
    importlib.reload(ranks)
    assert found[0].memory().weights.tolist() == [1.0] * 4


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace vLLM's module, and return a list that collects the sampling arguments of all requests."""
    found: list[dict[str, Any]] = []

    def sampling(**given: Any) -> SimpleNamespace:
        found.append(given)
        return SimpleNamespace(**given)

    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=sampling))
    monkeypatch.setitem(sys.modules, "benchmarks.vllm.connector", SimpleNamespace(there=lambda left: {"left": left}))
    return found


@pytest.mark.usefixtures("sampled")
@pytest.mark.parametrize("skip_prefill", [True, False])
def test_run_times_the_steps_of_the_case(skip_prefill: bool) -> None:
    """A run times exactly the case's steps. If it also computes prompts, it aborts its requests after those steps."""
    loop = OneRequest()
    engine = Engine("small-shape", "A", 16, skip_prefill=skip_prefill, max_num_batched_tokens=512)
    row = run(Case(1, 1024, 3), loop, engine)
    assert (row["steps"], row["tokens"]) == (3, 3)
    assert loop.ended == ([] if skip_prefill else [loop.name])


def test_prefill_after_a_context_computes_new_tokens(sampled: list[dict[str, Any]]) -> None:
    """In a case with a context, only the new prompt tokens count, and only engines that can skip the context run it."""
    case, engine = Case(1, 1024, new=64), Engine("small-shape", "A", 16, skip_prefill=True)
    row = run(case, OneRequest(), engine)
    assert (row["case"], row["phase"], row["tokens"]) == ("1x1k+64", "prefill", 64)
    assert sampled[0]["extra_args"] == {"left": 64} and sampled[0]["max_tokens"] == 1
    assert len(_prompts(case, engine)[0]["prompt_token_ids"]) == 1024 + 64
    assert case.asked_of(engine) and not case.asked_of(Engine("small-shape", "A", 16))


@pytest.mark.parametrize("drafts", [0, 4])
def test_mixed_steps_end_with_the_late_prompts_token(sampled: list[dict[str, Any]], drafts: int) -> None:
    """In a mixed case a prompt arrives during decode; its first token ends the timing, and its prompt tokens count."""
    case = Case(2, 1024, beside=2048)
    engine = Engine("small-shape", "A", 16, skip_prefill=True, max_num_batched_tokens=512, drafts=drafts)
    loop = Serving(steps_of_the_late=5)
    row = run(case, loop, engine)
    assert (row["case"], row["phase"], row["steps"]) == ("2x1k-beside-2k", "mixed", 5)
    assert row["tokens"] == 2048 + 2 * 5 and case.decodes and not case.is_long
    assert replace(case, beside=32768).is_long
    assert [len(one["prompt_token_ids"]) for one in loop.asked.values()] == [1024, 1024, 2048]
    *first, late = sampled
    assert all(one["extra_args"] == {"left": 1} and one["max_tokens"] > 5 for one in first)
    assert late["extra_args"] is None and late["max_tokens"] == 1
    assert loop.ended == list(loop.asked)
    assert case.asked_of(engine) and not case.asked_of(replace(engine, skip_prefill=False))
    assert not case.asked_of(replace(engine, kv_bytes=2 * 1024 * token_bytes(engine) + 1))


def test_overlapping_intervals_count_once() -> None:
    """Time with several kernels counts once, and time between kernels does not count."""
    assert covered([(0.0, 4.0), (1.0, 2.0), (3.0, 5.0), (10.0, 11.0)]) == 6.0
    assert covered([]) == 0.0


def test_median_of_repetitions_counts() -> None:
    """A row has the median speed and keeps all speeds."""
    rows = [{"case": "1x1k", "tokens_per_s": speed} for speed in (3.0, 1.0, 2.0)]
    assert medians(rows) == {"case": "1x1k", "tokens_per_s": 2.0, "all": [3.0, 1.0, 2.0]}


def test_texts_part_at_the_first_difference() -> None:
    """The comparison of two texts has the index of the first token that differs."""
    assert compare([[1, 2, 3], [4, 5]], [[1, 2, 9], [4, 5]]) == {"texts": 2, "equal": 1, "part_at": [2]}


def test_text_that_is_not_the_models_is_found() -> None:
    """In bfloat16, a token far below the model's best one is a wrong text; the model's own text is right."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    from draftmark_speculative.models import wrap_model

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, head_dim=16
    )
    hf = LlamaForCausalLM(config).bfloat16().eval()
    prompt = [3, 4, 5, 6]
    right = hf.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
    model = wrap_model(hf)
    row = {"backend": "CUSTOM", "dtype": "bfloat16", "texts": 1, "part_at": []}
    good = judge({**row, "tokens": [right]}, model, [prompt], [right])
    assert (good["equal"], good["wrong_texts"], good["tokens"]) == (1, [], 6)
    with torch.inference_mode():
        worst = int(hf(torch.tensor([prompt])).logits[0, -1].argmin())
    bad = judge({**row, "tokens": [[worst, *right[1:]]]}, model, [prompt], [right])
    assert (bad["equal"], bad["wrong_texts"]) == (0, [0])


def test_e4m3_texts_are_judged_with_an_e4m3_cache(tmp_path: Path) -> None:
    """A text made with an e4m3 cache is judged by a model that rounds K and V, and compared with such texts only."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16
    )
    hf = LlamaForCausalLM(config).bfloat16().eval()
    for layer in hf.model.layers:  # larger values, so that e4m3's rounding changes tokens
        layer.self_attn.v_proj.weight.data *= 30
    hf.save_pretrained(tmp_path)
    prompts = [[n, n + 1, n + 2, n + 3] for n in range(8)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))

    def texts() -> list[list[int]]:
        batch = torch.tensor(prompts)
        return hf.generate(batch, max_new_tokens=24, do_sample=False, use_cache=False)[:, 4:].tolist()

    plain = {"backend": "CUSTOM", "dtype": "bfloat16", "part_at": [], "tokens": texts()}
    one = hf(torch.tensor([[7]])).logits
    judged.read_back(hf, torch.float8_e4m3fn)
    rounded = {**plain, "kv_dtype": "fp8", "tokens": texts()}
    with torch.inference_mode():
        assert not torch.equal(hf(torch.tensor([[7]])).logits, one)
        # A row that sees one token returns that token's V, so rounding V here gives the output of an e4m3 cache.
        for layer in hf.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda _, __, v: v.to(torch.float8_e4m3fn).to(v.dtype))
        hf.set_attn_implementation("eager")
        expected = hf(torch.tensor([[7]])).logits
        judged.read_back(hf, torch.float8_e4m3fn)
        assert torch.equal(hf(torch.tensor([[7]])).logits, expected)
    assert plain["tokens"] != rounded["tokens"]
    right = judged.judge_all([plain, rounded], tmp_path)
    assert [(row["equal"], row["wrong_texts"]) for row in right] == [(8, []), (8, [])]
    (other,) = judged.judge_all([{**rounded, "tokens": plain["tokens"]}], tmp_path)
    assert other["furthest_below_best"] > right[1]["furthest_below_best"]


def test_read_back_rounds_keys_and_values() -> None:
    """The model that judges e4m3 texts rounds keys and values to e4m3, and leaves queries as they are."""
    pytest.importorskip("transformers")
    from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

    hf = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=32, intermediate_size=8, num_hidden_layers=1))
    judged.read_back(hf, torch.float8_e4m3fn)
    attend = AttentionInterface()[hf.config._attn_implementation]
    torch.manual_seed(1)
    q, k, v = (torch.randn(2, 4, 9, 16) for _ in range(3))
    found = attend(hf.model.layers[0].self_attn, q, k, v, None)[0].transpose(1, 2)

    def expected(rounds: str) -> torch.Tensor:
        named = zip("qkv", (q, k, v), strict=True)
        read = (x.to(torch.float8_e4m3fn).float() if name in rounds else x for name, x in named)
        return torch.nn.functional.scaled_dot_product_attention(*read, is_causal=True)

    assert torch.equal(found, expected("kv"))
    assert not any(torch.equal(found, expected(other)) for other in ("", "k", "v", "qkv"))


def test_sampled_texts_are_compared_with_the_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sampled texts are compared with the first row of equal temperature; greedy texts are judged by the model."""
    (tmp_path / "prompts.json").write_text("[[1], [2]]")
    monkeypatch.setattr("draftmark_speculative.models.load_model", lambda folder, dtype: None)
    monkeypatch.setattr(judged, "judge", lambda row, *_: {**row, "wrong_texts": []})
    usual = {"backend": "CUSTOM", "dtype": "float32", "part_at": []}
    rows = [
        {**usual, "tokens": [[1, 2], [3]]},
        {**usual, "temperature": 1.0, "tokens": [[1, 2], [3]]},
        {**usual, "temperature": 1.0, "tokens": [[1, 2], [4]]},
        {**usual, "temperature": 0.5, "tokens": [[1, 5], [4]]},
    ]
    found = judged.judge_all(rows, tmp_path)
    assert [(one.get("equal"), one["wrong_texts"]) for one in found] == [(None, []), (2, []), (1, [1]), (2, [])]
    assert not any("tokens" in one and isinstance(one["tokens"], list) for one in found[1:])


def test_packages_of_an_engine_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's folder of packages comes first on the import path of its process and its child processes."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "before")
    (tmp_path / "flashinfer-0.7.2").mkdir()
    fleet._set_up(Engine(**HEAD, packages="flashinfer-0.7.2"), tmp_path)
    found = str(tmp_path / "flashinfer-0.7.2")
    assert sys.path[0] == found
    assert os.environ["PYTHONPATH"] == os.pathsep.join([found, "before"])


@pytest.mark.skipif(len(cores.ALL) < 2, reason="one core")
def test_engine_runs_on_the_core_of_its_turn() -> None:
    """The main thread runs on its turn's core and other threads on the rest; with too few cores, nothing is pinned."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_stand, args=(theirs,))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    every = found["before"]
    assert found["pinned"] == [({every[turn % len(every)]}, set(every) - {every[turn % len(every)]}) for turn in (0, 3)]
    assert found["few"] == found["pinned"][-1]


def _stand(link: Any) -> None:
    """Send the CPU cores that both threads of this process may use: before, pinned, and with too few cores."""
    thread, stop = threading.Thread(target=lambda: stop.wait()), threading.Event()
    thread.start()
    engine = Engine("small-shape", backend="A", page_size=16)

    def here(llm: Any = None, engine: Any = None) -> tuple[set[int], set[int]]:
        return os.sched_getaffinity(os.getpid()), os.sched_getaffinity(thread.native_id or 0)

    found: dict[str, Any] = {"before": cores.ALL}
    cores.LEAST = 2
    found["pinned"] = [cores.on_core(turn, here, None, engine) for turn in (0, 3)]
    cores.LEAST = len(cores.ALL) + 1
    found["few"] = cores.on_core(0, here, None, engine)
    stop.set()
    link.send(found)


def test_each_rank_has_a_core_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine and its ranks run on different cores, which change with each turn; other threads use the rest.

    After its turn a rank moves to a core that has no work.
    """
    monkeypatch.setattr(cores, "ALL", list(range(9)))
    pinned: list[tuple[int, list[int]]] = []
    for module in (cores, ranks):
        monkeypatch.setattr(module, "pin", lambda core, rest: pinned.append((core, rest)))

    def call(method: str, args: tuple[Any, ...]) -> None:
        for number in range(2):
            rank = ranks.Rank()
            rank.rank = number
            getattr(rank, method)(*args)

    engine = Engine("small-shape", backend="A", page_size=16, num_gpus=2)
    for turn in (0, 1, 2):
        cores.on_core(turn, lambda llm, engine: None, SimpleNamespace(collective_rpc=call), engine)
    turns = [(0, 1, 2), (3, 4, 5), (6, 7, 0)]
    assert pinned == [(core, [one for one in range(9) if one not in turn]) for turn in turns for core in (*turn, 8, 8)]
    monkeypatch.setattr(cores, "ALL", list(range(5)))
    assert cores.on_core(0, lambda llm, engine: "asked", None, engine) == "asked"
    assert len(pinned) == 15
