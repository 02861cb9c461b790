"""`kernel_list`: the list of a geometry's compiled kernels is complete and equals what Triton compiles."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from triton import knobs

from draftmark import (
    AttentionShape,
    DeviceProfile,
    DraftShape,
    Form,
    Gate,
    Geometry,
    Limits,
    Mode,
    Recurrence,
    StateGeometry,
    StateShape,
)
from draftmark.batch import Block, Causal, Chosen, ForwardBatch, Tree
from draftmark.lengths import Unknown, UpperBound
from draftmark.runtime import KVCache
from draftmark_cuda_triton import backend, decode_verify, kernel_list, kv_write, prefill, prefill_fp8, sizing, tree_ops
from draftmark_cuda_triton.heuristics.split_kv import MAX_SPLIT_ROW_TILES
from draftmark_cuda_triton.kernel_spec import spec_of
from draftmark_cuda_triton.launch import combine, launcher, relaunch, tma
from draftmark_cuda_triton.launch.operands import AttentionParams, Operands
from draftmark_cuda_triton.state.commit import COMMIT_TENSORS
from draftmark_cuda_triton.state.convolve import CONV_TENSORS, ONE_TENSORS
from draftmark_cuda_triton.state.kernel_list import state_calls_of
from draftmark_cuda_triton.state.recur import ROW_TENSORS, VERIFY_TENSORS

ENGINE_MODES = (Mode.EXTEND, Mode.DECODE, Mode.RAGGED_VERIFY)
CHAIN = DraftShape(1, 4, 5)
STEPS = int(os.environ.get("DRAFTMARK_STEPS", "100"))
"""Random steps of each geometry."""


def geometry_of(modes=ENGINE_MODES, draft=CHAIN, max_reqs=48, **shape) -> Geometry:
    """Return a geometry of Llama-8B's attention on an H200; `shape` replaces fields of the attention shape."""
    fields = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16} | shape
    device = DeviceProfile("cuda", 90, 132)
    return Geometry.create(AttentionShape(**fields), Limits(max_reqs, 8192, 4096), draft, device, modes)


def plain(value):
    """Return a value as JSON holds it."""
    return json.loads(json.dumps(value, default=str))


@pytest.mark.parametrize(
    "geometry",
    [
        geometry_of(),
        geometry_of(kv_dtype="float8_e4m3fn"),
        geometry_of(tuple(Mode), DraftShape(4, 3, 16, 8), page_size=1, sinks=True),
        geometry_of(q_dtype="float32", kv_dtype="float32"),
    ],
    ids=["bfloat16", "e4m3", "every mode", "float32"],
)
def test_listed_kernel_is_what_triton_compiles(fake_gpu, monkeypatch, geometry):
    """For each call, the listed types, constants, alignments and options are those that Triton would compile."""
    compiled = []

    def note(*_, compile, **__):
        compiled.append((compile, json.loads(compile["specialization_data"])["options"]))
        return True  # Triton then compiles nothing

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    count = 0

    def compare(call):
        nonlocal count
        spec, (kernel, args, constants) = spec_of(call, 90), call
        assert constants.keys() >= {*kernel.arg_names[len(args) :]}, "the launcher reads no default of a parameter"
        kernel[(1,)](*args, **constants)
        found, options = compiled[-1]
        assert found["signature"] == dict(spec.signature) and found["constants"] == dict(spec.constexprs)
        assert {path: tuple(map(tuple, one)) for path, one in found["configs"][0].items()} == dict(spec.attrs)
        assert plain(dict(spec.options)) == options and options["enable_fp_fusion"]
        count += 1

    with launcher.LAUNCHER.collect(compare):
        kernel_list.launch_all(geometry, kernel_list.EngineUse(), trees=True)
    assert count == len(compiled) > 20


@pytest.mark.parametrize("name", ["write_kv_rows", "combine_splits"])
def test_listed_kernel_compiles_without_a_driver(monkeypatch, tmp_path, name):
    """A listed kernel compiles to machine code on a computer without a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spec = next(one for one in kernel_list.kernels_of(geometry_of(), 90) if one.kernel.__name__ == name)
    assert spec.compile().asm["cubin"].startswith(b"\x7fELF")


@pytest.mark.parametrize("heads", [(8, 1), (16, 2), (24, 8), (32, 32), (12, 3)], ids=str)
def test_prompts_combine_with_listed_kernels_only(heads):
    """Any number of row tiles of a prompt combines with a kernel that is listed without any other mode."""
    geometry = geometry_of((Mode.EXTEND,), num_qo_heads=heads[0], num_kv_heads=heads[1])
    shape = AttentionParams.from_geometry(geometry, True)
    specs = [one for one in kernel_list.kernels_of(geometry, 90) if one.kernel.__name__ == "combine_splits"]
    listed = {dict(one.constexprs)[(one.kernel.arg_names.index("BLOCK_SPLITS"),)] for one in specs}
    own = kernel_list.stand_in_buffers(sizing.split_buffers(geometry, [], True))
    plans = prefill.Prefill(
        geometry, kernel_list.stand_in(4096, dtype="int64"), kernel_list.stand_in(64, 2), own
    ).plans()
    splits = [plan.split.num_splits for plan in plans if plan.split is not None]
    met = {
        combine.combine_grid(shape, count // tiles + 2, 64, 64, True)[2]["BLOCK_SPLITS"]
        for count in splits
        for tiles in range(1, 2 * MAX_SPLIT_ROW_TILES + 1)
    }
    assert met and met <= listed


class Traffic:
    """Draws random steps of an engine and passes them to a backend on fake GPU tensors.

    Requests of a part begin at any row of the static buffers, page tables have any pitch, and q, K and V are slices of
    one projection that begin at any row.
    """

    def __init__(self, geometry, layers, seed):
        self.geometry, self.chance, self.new, self.as_gpu = (
            geometry,
            random.Random(seed),
            layers.new_tensor,
            layers.as_gpu,
        )
        a, self.room = geometry.attention, 3 * geometry.max_reqs
        self.q_dtype, self.kv_dtype = getattr(torch, a.q_dtype), getattr(torch, a.kv_dtype)
        specs = sizing.buffers(geometry)
        arena = {one.name: self.new(*map(int, one.shape), dtype=getattr(torch, one.dtype)) for one in specs}
        self.backend, self.tree_ops = backend.TritonBackend(geometry, arena), tree_ops.TritonTreeOps(geometry)
        self.rows = int(geometry.max_rows_any) + 64
        self.per_request, self.per_row = (
            self.new(self.room + 1, dtype=torch.int32),
            self.new(self.rows, dtype=torch.int64),
        )
        self.masks = self.new(self.rows, int(geometry.mask_words), dtype=torch.int32)
        self.projected = self.new(self.rows, a.num_qo_heads + 2 * a.num_kv_heads, a.head_dim, dtype=self.q_dtype)
        self.out = self.new(self.rows, a.num_qo_heads, a.value_width, dtype=self.q_dtype)
        self.scale = self.new(4, dtype=torch.float32)

    def slice(self, tensor, first, count):
        """Return `count` rows of a static buffer, from row `first` on."""
        return self.as_gpu(tensor[first : first + count])

    def table(self, first, count):
        """Return a page table at an odd row of a table with any pitch."""
        pitch = int(self.geometry.max_pages_per_req) + self.chance.choice((0, 1, 3, 16))
        return self.slice(self.new(first + count, pitch, dtype=torch.int32), first, count)

    def cache(self):
        """Return a layer's cache of any number of pages: K and V contiguous, or interleaved by page; or latent rows."""
        a, pages = self.geometry.attention, self.chance.choice((2, 3, 5))
        if a.latent:
            return self.latent_cache(pages)
        shape = (a.page_size, a.num_kv_heads, a.head_dim)
        if self.chance.random() < 0.5:
            k, v = map(self.as_gpu, self.new(pages, 2, *shape, dtype=self.kv_dtype).unbind(1))
        else:
            k, v = (self.new(pages, *shape, dtype=self.kv_dtype) for _ in "kv")
        first = self.chance.randrange(3)
        scales = (
            [self.slice(self.scale, first + n, 1) for n in range(2)] if self.kv_dtype != self.q_dtype else [None] * 2
        )
        return KVCache(k, v, *scales, self.new(a.num_qo_heads, dtype=torch.float32) if a.sinks else None)

    def latent_cache(self, pages):
        """Return a cache of latent rows in one buffer, or in two with LATENT_PARTS."""
        a, parts = self.geometry.attention, Form.LATENT_PARTS in self.geometry.forms
        widths = (a.value_width, a.head_dim - a.value_width) if parts else (a.head_dim,)
        rows = tuple(self.new(pages, a.page_size, width, dtype=self.kv_dtype) for width in widths)
        return KVCache.latent(rows if parts else rows[0], value_dim=a.value_width)

    def batch(self):
        """Return a batch of any mode and size."""
        geometry, chance, mode = self.geometry, self.chance, self.chance.choice(self.geometry.modes)
        first, count = chance.randrange(9), chance.randint(1, geometry.max_reqs)
        if mode is Mode.EXTEND:
            left, q_lens = geometry.limits.max_extend_tokens, []
            for _ in range(count if chance.random() < 0.3 else min(count, 3)):
                q_lens.append(chance.choice((0, 1, chance.randint(0, left), left)) if left else 0)
                left -= q_lens[-1]
            q_lens, tail = tuple(q_lens) if any(q_lens) else (1,), Causal()
        else:
            q_lens = (int(geometry.extent(mode, geometry.last_step(mode)).q_len),) * count
            tail = chance.choice((Block(), Causal())) if mode is Mode.DRAFT_BLOCK else Causal()
        rows, requests = sum(q_lens), len(q_lens)
        branches = geometry.draft.topk > 1
        if branches and mode in (Mode.DRAFT, Mode.VERIFY, Mode.RAGGED_VERIFY):
            row = chance.randrange(9)
            tail = Tree(self.slice(self.masks, row, rows), self.slice(self.per_row.view(torch.int32), row, rows))
        host = Unknown(requests, 4000)
        if chance.random() < 0.7:
            host = UpperBound(tuple(chance.choice((0, 17, 900, 6000)) for _ in q_lens))
        lens, indptr = (self.slice(self.per_request, first, requests + n) for n in range(2))
        positions, slots = (self.slice(self.per_row, chance.randrange(9), rows) for _ in range(2))
        lists, width = None, geometry.attention.chosen_width
        if width:
            counts = self.slice(self.per_row.view(torch.int32), chance.randrange(9), rows)
            lists = Chosen(self.new(rows, width, dtype=torch.int32), counts)
        return ForwardBatch(
            mode, 0, lens, indptr, self.table(first, requests), tail, positions, host, requests, q_lens, q_lens, rows,
            slots if Form.ENGINE_SLOTS in geometry.forms else None, chosen=lists,
        )  # fmt: skip

    def step(self):
        """Run one step: metadata, then the KV store and attention of one layer, then the tree operations."""
        a, batch, cache, row = self.geometry.attention, self.batch(), self.cache(), self.chance.randrange(9)
        q, k, v = (
            self.as_gpu(one)
            for one in self.slice(self.projected, row, batch.num_rows).split(
                (a.num_qo_heads, a.num_kv_heads, a.num_kv_heads), 1
            )
        )
        if self.chance.random() < 0.3:
            q, k, v = (self.as_gpu(one.contiguous()) for one in (q, k, v))
        self.backend.write_metadata(batch)
        self.backend.write_kv(k, None if a.latent else v, cache, batch)
        self.backend.attend(q, cache, batch, self.slice(self.out, row, batch.num_rows))
        if batch.mode in (Mode.VERIFY, Mode.DRAFT_EXTEND, Mode.DECODE):
            nodes, count = batch.q_lens[0], batch.padded_reqs
            per_node = [self.slice(self.per_row, self.chance.randrange(9), count * nodes) for _ in range(3)]
            drafts, parents, targets = (self.as_gpu(one.view(count, nodes)) for one in per_node)
            self.tree_ops.write_tail(batch, parents if isinstance(batch.tail, Tree) else None)
            if batch.mode is Mode.VERIFY:
                self.tree_ops.verify_tree(drafts, parents, targets)


SIZES = {"q_len", "tail_len", "num_reqs", "num_rows", "num_tiles", "num_splits", "count", "stride_table"}
"""Integers that change from one step to the next. A page table's stride is the engine's choice."""
BATCH_TENSORS = {
    *("prefix_lens", "q_indptr", "page_table", "slot_mapping", "engine_slots", "tail_mask", "tail_depth"),
    *("parents", "mask", "depth", "positions", "drafts", "targets", "chosen_slots", "chosen_counts"),
}
"""Tensors of a batch, which can begin at any row of a static buffer."""


def test_no_kernel_is_specialized_on_a_batch(monkeypatch):
    """No kernel is compiled separately for a batch's sizes, or for the addresses of its tensors."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    listed = listed_kernels()
    wrong = {
        f"{kernel.__name__}: {param.name}"
        for kernel in listed
        for param in kernel.params
        if not param.do_not_specialize
        and (param.name in SIZES or (param.name in BATCH_TENSORS and not param.do_not_specialize_on_alignment))
    }
    assert len(listed) > 12 and not wrong


def test_addresses_with_own_kernels_are_part_of_a_layout():
    """`relaunch.ALIGNED` has exactly the tensors of a recorded launch for which alignment selects a kernel."""
    recorded = {*prefill.PER_CALL, *prefill_fp8.PER_CALL, *Operands._fields, *decode_verify.PER_STEP}
    recorded |= {*kv_write.PER_CALL, *ROW_TENSORS, *VERIFY_TENSORS, *CONV_TENSORS, *ONE_TENSORS, *COMMIT_TENSORS}
    in_chunks = replace(HYBRID_KDA, state=replace(HYBRID_KDA.state, dtype="float32"))
    of_state = [one for geometry in (HYBRID, HYBRID_KDA, in_chunks) for one in state_calls_of(geometry, 90)]
    aligned = {
        param.name
        for kernel in listed_kernels().union(one.kernel for one in of_state)
        for param in kernel.params
        if param.name in recorded and not (param.do_not_specialize or param.do_not_specialize_on_alignment)
    }
    assert aligned == relaunch.ALIGNED


HYBRID = StateGeometry.create(
    StateShape(Recurrence.DELTA, Gate.HEAD, 4, 2, 128, 128, 1024, 4, "bfloat16"), Limits(2, 64, 8), DraftShape(2, 3, 4)
)
HYBRID_KDA = replace(HYBRID, state=replace(HYBRID.state, gate=Gate.KEY))
LATENT = {"num_qo_heads": 16, "num_kv_heads": 1, "head_dim": 576, "value_dim": 512, "latent": True, "page_size": 64}
CHOSEN = LATENT | {"chosen_width": 2048}
CASES = {
    "chain": (90, geometry_of((*ENGINE_MODES, Mode.VERIFY)), 12),
    "plain": (90, geometry_of((Mode.EXTEND, Mode.DECODE), DraftShape(), 256), 11),
    "tensor parallel": (90, geometry_of((*ENGINE_MODES, Mode.VERIFY), num_qo_heads=8, num_kv_heads=1), 12),
    "page 1": (90, geometry_of(page_size=1), 12),
    "heads of 64": (90, geometry_of(num_qo_heads=64, head_dim=64, sinks=True, window_left=127), 12),
    "heads of 96": (90, geometry_of(num_qo_heads=24, head_dim=96), 13),
    "e4m3": (90, geometry_of(kv_dtype="float8_e4m3fn"), 14),
    "e4m3, rounded": (
        90,
        geometry_of(
            (Mode.EXTEND, Mode.DECODE, Mode.VERIFY), DraftShape(1, 4, 20), kv_dtype="float8_e4m3fn", round_to_e4m3=True
        ),
        11,
    ),
    "tree": (90, geometry_of((Mode.EXTEND, Mode.DECODE, Mode.VERIFY), DraftShape(4, 3, 16)), 13),
    "every mode": (90, geometry_of(tuple(Mode), DraftShape(4, 3, 16, 8)), 18),
    "latent": (90, geometry_of((*ENGINE_MODES, Mode.VERIFY), softmax_scale=0.1, **LATENT), 12),
    "latent trees": (90, geometry_of(tuple(Mode), DraftShape(4, 3, 16, 8), softmax_scale=0.1, **LATENT), 19),
    "chosen keys": (90, geometry_of(tuple(Mode), DraftShape(4, 3, 16, 8), softmax_scale=0.1, **CHOSEN), 11),
    "Ampere": (80, geometry_of((*ENGINE_MODES, Mode.VERIFY)), 12),
    "Blackwell": (
        100,
        geometry_of((*ENGINE_MODES, Mode.VERIFY), page_size=64),
        16,
    ),  # K and V contiguous, or interleaved
}
TREE_KERNELS = {"write_tree_tail", "verify_tree", "compact_kv"}


@cache
def listed_kernels():
    """Return the listed kernels of all cases."""
    return {one.kernel for arch, geometry, _ in CASES.values() for one in kernel_list.kernels_of(geometry, arch)}


@pytest.mark.parametrize(
    ("fake_driver", "name"), [(case[0], name) for name, case in CASES.items()], indirect=["fake_driver"]
)
def test_random_traffic_launches_listed_kernels_only(fake_gpu, make_layers, monkeypatch, name):
    """Every launch of random steps is of a listed kernel, and a geometry's list stays small."""
    arch, geometry, most = CASES[name]
    seed = sum(map(ord, name))
    forms = (Form.ENGINE_SLOTS,) if seed % 2 else ()
    forms += (Form.LATENT_PARTS,) if name == "latent trees" else ()
    geometry = replace(geometry, device=replace(geometry.device, arch=arch), forms=forms)
    listed = kernel_list.calls_of(geometry)
    monkeypatch.setattr(
        relaunch.RelaunchCache, "__call__", lambda _, layout, tensors, launch, *own: launch(*own, *tensors)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    traffic, launched = Traffic(geometry, make_layers, seed), {}
    monkeypatch.setattr(tma, "has_fast_memory", lambda _: traffic.chance.random() < 0.5)
    with launcher.LAUNCHER.collect(lambda call: launched.setdefault(spec_of(call, arch), call)):
        for _ in range(STEPS):
            traffic.step()
    assert not [one.name for one in launched if one not in listed]
    # A listed call also loads the kernel under the key with which a launch looks it up.
    ready, looked_up = (
        {launcher.LAUNCHER.key(call[0], 0, *call[1:]) for call in found.values()} for found in (listed, launched)
    )
    assert looked_up <= ready
    attention = [one for one in listed if one.kernel.__name__ not in TREE_KERNELS]
    trees = len(listed) - len(attention)
    print(f"{name}: {len(attention)} kernels and {trees} tree operations listed, {len(launched)} launched")
    # Two parts of latent rows move in one launch each.
    assert len(attention) <= most and trees <= len(TREE_KERNELS) + (Form.LATENT_PARTS in forms)
