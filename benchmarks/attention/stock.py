"""Costs of FlashInfer's own wrappers besides their kernels: `plan()` on the host, and memory per captured batch size.

The memory of one more captured size is also measured for our plugins. Index buffers are allocated once and passed to
every wrapper as slices, as engines do, so only the wrapper's own memory is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from draftmark import AttentionShape, BackendError, DraftShape, Geometry, Limits, Mode, load
from draftmark.batch import BatchBuffers, ForwardBatch
from draftmark.cache import KVCache
from draftmark.devices import device_profile
from draftmark.graphs import GraphKey, Program
from draftmark.lengths import Exact

from .models import STANDARD
from .ours import OURS, STEPS, host_us, stepped
from .peers import WORKSPACE_BYTES, import_flashinfer
from .stubs import Absent

HEADS, KV_HEADS, DIM, PAGE, SCALE = STANDARD.heads, STANDARD.kv_heads, STANDARD.dim, STANDARD.page, STANDARD.scale
SIZES = (64, 32)
"""Captured batch sizes, the largest first as in every engine. The memory of the second size is measured."""
CONTEXT = 8192


# -- plan() -----------------------------------------------------------------------------------------------------------


def plan_rows() -> list[dict]:
    """Measure the host time of FlashInfer's `plan()` on the batches of `ours.metadata_rows`."""
    try:
        fi = import_flashinfer()
    except Absent as absent:
        print(f"plan flashinfer: absent: {absent}", flush=True)
        return []
    rows = []
    for requests in (64, 256):
        for kind, mode, draft in STEPS:
            _, batch = stepped(requests, mode, draft)
            us = host_us(_decode_plan(fi, batch) if mode is Mode.DECODE else _verify_plan(fi, batch))
            case = f"metadata-{requests}-{kind}"
            note = "its blocking copies included" if mode is Mode.DECODE else "its blocking copies and mask included"
            rows.append({"case": case, "backend": "flashinfer", "plan_host_us": us, "note": note})
            print(f"{case:24} {'flashinfer':20} plan {us:6.1f} us", flush=True)
            torch.cuda.empty_cache()
    return rows


def _decode_plan(fi: object, batch: ForwardBatch) -> Callable[[], None]:
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True, backend="fa2")
    return partial(wrapper.plan, *_csr(batch), HEADS, KV_HEADS, DIM, PAGE, sm_scale=SCALE,
                   q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip


def _verify_plan(fi: object, batch: ForwardBatch) -> Callable[[], None]:
    """Return the plan call of a verification. Its custom mask covers every key; the bits do not affect its time."""
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    bits = sum(q * (n + t) for q, n, t in zip(batch.q_lens, batch.host.lens, batch.tail_lens, strict=True))
    mask = torch.ones(bits, dtype=torch.bool, device="cuda")
    return partial(wrapper.plan, batch.q_indptr, *_csr(batch), HEADS, KV_HEADS, DIM, PAGE, custom_mask=mask,
                   sm_scale=SCALE, q_data_type=torch.bfloat16)  # fmt: skip


def _csr(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys = [n + t for n, t in zip(batch.host.lens, batch.tail_lens, strict=True)]
    counts = [-(-n // PAGE) for n in keys]
    indptr = torch.tensor([0, *counts]).cumsum(0).int().cuda()
    last = torch.tensor([(n - 1) % PAGE + 1 for n in keys], dtype=torch.int32, device="cuda")
    return indptr, torch.cat([batch.page_table[r, :n] for r, n in enumerate(counts)]), last


# -- memory of one more captured size ---------------------------------------------------------------------------------


def key_rows() -> list[dict]:
    """Measure the device and pinned bytes that each plugin needs to capture one more, smaller batch size."""
    rows = []
    for kind, mode, draft in STEPS:
        capturers: dict[str, Callable[[], Callable[[int], object]]] = {
            **{name: partial(_ours, plugin, mode, draft) for name, plugin in OURS.items()},
            "flashinfer": partial(_stock, mode, draft),
        }
        for name, make in capturers.items():
            case = f"graph-key-{kind}"
            try:
                capture = make()
            except (Absent, BackendError) as error:
                print(f"{case:24} {name:20} absent: {error}", flush=True)
                continue
            first, before = capture(SIZES[0]), _weigh()
            second = capture(SIZES[1])
            device, pinned = (now - then for now, then in zip(_weigh(), before, strict=True))
            rows.append({"case": case, "backend": name, "device_bytes": device, "pinned_bytes": pinned})
            print(f"{case:24} {name:20} {device} bytes on the device, {pinned} pinned", flush=True)
            del capture, first, second
            torch.cuda.empty_cache()
    return rows


def _weigh() -> tuple[int, int]:
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), int(torch.cuda.host_memory_stats()[PINNED])


PINNED = "active_bytes.current"


def _geometry(mode: Mode, draft: DraftShape) -> Geometry:
    limits = Limits(SIZES[0], CONTEXT, capture_batch_sizes=tuple(sorted(SIZES)))
    return Geometry.create(AttentionShape(HEADS, KV_HEADS, DIM, PAGE), limits, draft, device_profile("cuda"), (mode,))


def _layer(rows: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return q, a pool of one page, and out."""
    q = torch.zeros(rows, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    k, v = (torch.zeros(1, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return q, (k, v), torch.empty_like(q)


def _ours(plugin: str, mode: Mode, draft: DraftShape) -> Callable[[int], object]:
    geometry = _geometry(mode, draft)
    backend, graphs = load(plugin).open(geometry, "cuda"), load(plugin).graph_state(geometry, torch.device("cuda"))
    buffers, q_len = BatchBuffers(geometry, "cuda"), geometry.extent(mode).q_len
    q, pair, out = _layer(SIZES[0] * q_len)

    def capture(size: int) -> object:
        batch = buffers.uniform(mode, 0, size, size, Exact((0,) * size), tree=mode is Mode.VERIFY)

        def step() -> None:
            backend.write_metadata(batch)
            backend.attend(q[: batch.num_rows], KVCache(*pair), batch, out[: batch.num_rows])

        backend.plan(batch)
        step()
        graphs.capture(GraphKey(Program(mode.value), size), step)
        return batch, backend, graphs

    return capture


def _stock(mode: Mode, draft: DraftShape) -> Callable[[int], object]:
    """Return a function that captures a FlashInfer wrapper for a batch size, on shared workspace and index buffers."""
    fi, q_len = import_flashinfer(), draft.num_draft_tokens if mode is Mode.VERIFY else 1
    most, keys = SIZES[0], CONTEXT + q_len
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    q, pair, out = _layer(most * q_len)
    # Every request has one page, but index buffers have the size for full contexts, as in an engine.
    indptr = torch.arange(most + 1, dtype=torch.int32, device="cuda")
    ids = torch.zeros(most * -(-keys // PAGE), dtype=torch.int32, device="cuda")
    last = torch.full((most,), PAGE, dtype=torch.int32, device="cuda")
    held = [indptr.clone(), ids.clone(), last.clone(), torch.empty(most + 1, dtype=torch.int32, device="cuda")]
    bits = torch.empty(most * -(-q_len * keys // 8), dtype=torch.uint8, device="cuda")
    offsets = torch.empty(most + 1, dtype=torch.int32, device="cuda")
    mask = torch.ones(most * q_len * PAGE, dtype=torch.bool, device="cuda")

    def capture(size: int) -> object:
        if mode is Mode.DECODE:
            wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, use_tensor_cores=True, backend="fa2",
                paged_kv_indptr_buffer=held[0][: size + 1], paged_kv_indices_buffer=held[1],
                paged_kv_last_page_len_buffer=held[2][:size],
            )  # fmt: skip
            wrapper.plan(indptr[: size + 1], ids[:size], last[:size], HEADS, KV_HEADS, DIM, PAGE, sm_scale=SCALE,
                         q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16)  # fmt: skip
        else:
            wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(
                workspace, "NHD", use_cuda_graph=True, backend="fa2", qo_indptr_buf=held[3][: size + 1],
                paged_kv_indptr_buf=held[0][: size + 1], paged_kv_indices_buf=held[1],
                paged_kv_last_page_len_buf=held[2][:size], custom_mask_buf=bits, mask_indptr_buf=offsets[: size + 1],
            )  # fmt: skip
            wrapper.plan(indptr[: size + 1] * q_len, indptr[: size + 1], ids[:size], last[:size], HEADS, KV_HEADS, DIM,
                         PAGE, custom_mask=mask[: size * q_len * PAGE], sm_scale=SCALE,
                         q_data_type=torch.bfloat16)  # fmt: skip
        rows = size * q_len
        wrapper.run(q[:rows], pair, out=out[:rows])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            wrapper.run(q[:rows], pair, out=out[:rows])
        return wrapper, graph

    return capture
