"""draftmark's own plugins in the attention benchmark: kernels, cost of plan and write_metadata, and graph memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from draftmark import AttentionShape, BackendError, DraftShape, Form, Geometry, Limits, Mode, load
from draftmark.batch import Causal, ForwardBatch, Tree
from draftmark.cache import KVCache
from draftmark.devices import device_profile
from draftmark.lengths import Exact
from draftmark.loaded import LoadedBackend

from .cases import Case, Inputs, microseconds
from .models import STANDARD, Model
from .peers import Peer
from .stubs import Absent

OURS: dict[str, str | LoadedBackend] = {
    "cuda_triton": "cuda_triton", "draftmark-flashinfer": "cuda_flashinfer", "draftmark-trtllm": "cuda_trtllm",
}  # fmt: skip
"""Names of our rows, and the plugin of each: its name, or a loaded backend (`versions`)."""
STEPS = (("decode", Mode.DECODE, DraftShape()), ("verify64", Mode.VERIFY, DraftShape(8, 5, 64)))


def attention(model: Model) -> AttentionShape:
    """Convert a model's attention shape to draftmark's `AttentionShape`."""
    return AttentionShape(
        model.heads, model.kv_heads, model.dim, model.page, kv_dtype=model.kv_dtype, window_left=model.window_left,
        logits_soft_cap=model.cap, sinks=model.sinks, round_to_e4m3=model.rounded,
    )  # fmt: skip


def batch_of(inputs: Inputs) -> tuple[Geometry, ForwardBatch]:
    """Return the geometry and the batch of a case."""
    case, requests, device = inputs.case, len(inputs.case.lens), inputs.q.device
    mode, step, draft = _mode(case)
    rows = sum(case.q_lens)
    limits = Limits(requests, max(case.lens) + case.tail_len, max(2048, rows if case.ragged else 0))
    forms = (Form.STRIDED_KV,) if case.model.packed else ()
    geometry = Geometry.create(attention(case.model), limits, draft, device_profile(device.type), (mode,), forms)
    tail = Tree(inputs.mask, inputs.depth) if case.tree else Causal()
    positions = torch.zeros(rows, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        mode, step, inputs.prefix_lens, inputs.q_indptr, inputs.page_table, tail, positions, Exact(case.lens),
        requests, case.q_lens, case.tail_lens, rows, None,
    )  # fmt: skip
    return geometry, batch


def _mode(case: Case) -> tuple[Mode, int, DraftShape]:
    if case.ragged:
        return Mode.EXTEND, 0, DraftShape()
    if not case.tree and case.q_len == 1:
        return Mode.DECODE, 0, DraftShape()
    if not case.tree:
        return Mode.RAGGED_VERIFY if case.uneven else Mode.VERIFY, 0, DraftShape(1, case.q_len - 1, case.q_len)
    if case.q_len == case.tail_len:
        return Mode.VERIFY, 0, DraftShape(topk=8, num_steps=5, num_draft_tokens=case.q_len)
    step = case.tail_len // case.q_len - 1
    return Mode.DRAFT, step, DraftShape(topk=case.q_len, num_steps=step + 2, num_draft_tokens=case.tail_len)


def loaded(plugin: str | LoadedBackend) -> LoadedBackend:
    """Load a plugin by its name; return an already loaded plugin unchanged."""
    return load(plugin) if isinstance(plugin, str) else plugin


def ours(plugin: str | LoadedBackend, inputs: Inputs) -> Peer:
    """Run one of draftmark's plugins: plan and write_metadata run before the timed calls, which call attend."""
    geometry, batch = batch_of(inputs)
    try:
        backend = loaded(plugin).open(geometry, inputs.q.device.type)
    except BackendError as error:
        raise Absent(str(error)) from error
    backend.plan(batch)
    backend.write_metadata(batch)
    outs = [torch.full_like(inputs.q, float("nan")) for _ in inputs.caches]
    scale = torch.ones(1, device=inputs.q.device) if inputs.case.model.is_narrow else None
    layers = [KVCache(*pair, scale, scale, inputs.sinks) for pair in inputs.caches]
    calls = [
        lambda kv=kv, out=out: backend.attend(inputs.q, kv, batch, out) for kv, out in zip(layers, outs, strict=True)
    ]
    return Peer(calls, outs, rounds=inputs.case.model.rounded)


def exact(plugin: str | LoadedBackend, inputs: Inputs) -> Peer:
    """Run one of draftmark's plugins on a case that may round, without the permission to round."""
    case = inputs.case
    return ours(plugin, replace(inputs, case=replace(case, model=replace(case.model, rounded=False))))


def metadata_rows() -> list[dict]:
    """Measure the cost of a step besides attention: write_metadata on the GPU; plan and write_metadata on the host."""
    rows = []
    for requests in (64, 256):
        for kind, mode, draft in STEPS:
            geometry, batch = stepped(requests, mode, draft)
            for name, plugin in OURS.items():
                try:
                    backend = loaded(plugin).open(geometry, "cuda")
                except BackendError as error:
                    print(f"metadata-{requests}-{kind} {name}: absent: {error}", flush=True)
                    continue
                backend.plan(batch)
                us = microseconds([partial(backend.write_metadata, batch)] * 20)
                host = host_us(partial(backend.write_metadata, batch))
                plan = host_us(partial(backend.plan, batch))
                case = f"metadata-{requests}-{kind}"
                rows.append({"case": case, "backend": name, "us": us, "host_us": host, "plan_host_us": plan})
                times = f"{us:6.1f} us on the GPU, {host:6.1f} us on the host, plan {plan:6.1f} us"
                print(f"{case:24} {name:20} {times}", flush=True)
    return rows


def stepped(requests: int, mode: Mode, draft: DraftShape) -> tuple[Geometry, ForwardBatch]:
    """Return a batch of random lengths up to 131072 tokens, with a tree if the mode has one."""
    limits = Limits(requests, 131072)
    geometry = Geometry.create(attention(STANDARD), limits, draft, device_profile("cuda"), (mode,))
    extent = geometry.extent(mode)
    count = requests * extent.q_len
    lens = torch.randint(1, 131072, (requests,), dtype=torch.int32)
    tail = Causal()
    if mode is Mode.VERIFY:
        mask = torch.full((count, geometry.mask_words), -1, dtype=torch.int32, device="cuda")
        tail = Tree(mask, torch.zeros(requests, extent.tail_len, dtype=torch.int32, device="cuda"))
    batch = ForwardBatch(
        mode, 0, lens.cuda(), torch.arange(requests + 1, dtype=torch.int32, device="cuda") * extent.q_len,
        torch.randint(1, 9999, (requests, geometry.max_pages_per_req), dtype=torch.int32, device="cuda"), tail,
        torch.zeros(count, dtype=torch.int64, device="cuda"), Exact(tuple(lens.tolist())), requests,
        (extent.q_len,) * requests, (extent.tail_len,) * requests, count, None,
    )  # fmt: skip
    return geometry, batch


def host_us(call: Callable[[], None], rounds: int = 200) -> float:
    """Return the median host time of a call in µs. The device is synchronised every 20 calls, so it never blocks."""
    times = []
    for number in range(rounds):
        if number % 20 == 0:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    return sorted(times)[rounds // 2]


def memory_rows() -> list[dict]:
    """Measure declared and allocated bytes of the graph state for 256 requests, context 131072 and 64 draft tokens."""
    from draftmark import DRAFT_MODES, TARGET_MODES

    rows = []
    limits = Limits(256, 131072, 8192, (256,))
    shape = attention(STANDARD)
    for case, modes in (("graph-state-target", TARGET_MODES), ("graph-state-draft", DRAFT_MODES)):
        geometry = Geometry.create(shape, limits, DraftShape(8, 5, 64), device_profile("cuda"), modes)
        for name, plugin in OURS.items():
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            try:
                backend = loaded(plugin).open(geometry, "cuda")
            except BackendError as error:
                print(f"{case:24} {name:20} absent: {error}", flush=True)
                continue
            on_device = torch.cuda.memory_allocated() - before
            declared = sum(one.nbytes for one in loaded(plugin).buffers(geometry) if not one.pinned)
            rows.append({"case": case, "backend": name, "declared_bytes": declared, "device_bytes": on_device})
            sizes = f"{declared / 2**20:8.1f} MiB declared, {on_device / 2**20:8.1f} MiB on the device"
            print(f"{case:24} {name:20} {sizes}", flush=True)
            del backend  # free the backend's arena before the next measurement
    return rows
