"""Shared fixtures of core's tests: small geometries, command lines, temporary plugins, and scenes.

A scene describes one forward in plain Python: committed lengths, tail slots, and the slots that each row sees. Its
brute-force visibility (`Scene.visible`) shares no code with the package. `PagedScene` lays a scene out in KV pages and
runs a backend's four methods on it.
"""

from __future__ import annotations

import io
import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import draftmark
from draftmark import CORE_MODES, AttentionShape, DeviceProfile, DraftShape, Form, Geometry, Limits, Mode
from draftmark.arena import Arena
from draftmark.backend import AttentionBackend, BoundBackend
from draftmark.batch import BatchBuffers, Chosen, ForwardBatch, ragged, validate
from draftmark.cache import KVCache
from draftmark.cli import main
from draftmark.lengths import Exact, HostLengths, Unknown, UpperBound
from draftmark_reference.backend import ReferenceBackend

settings.register_profile(
    "draftmark", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("draftmark")

ALL_MODES = CORE_MODES
SMALL = {
    "num_qo_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "page_size": 4,
    "q_dtype": "float32",
    "kv_dtype": "float32",
    "max_num_reqs": 4,
    "max_context_len": 32,
    "max_extend_tokens": 16,
}


def _make_geometry(**fields: Any) -> Geometry:
    flat = SMALL | fields
    parts = [
        kind(**{name: flat.pop(name) for name in kind.__dataclass_fields__ if name in flat})
        for kind in (AttentionShape, Limits, DraftShape, DeviceProfile)
    ]
    modes, forms = flat.pop("modes", ALL_MODES), flat.pop("forms", ())
    assert not flat, f"unknown geometry fields {sorted(flat)}"
    return Geometry.create(*parts, modes=modes, forms=forms)


@pytest.fixture(scope="session")
def make_geometry() -> Callable[..., Geometry]:
    """Return a function that makes a small float32 geometry with all modes; keywords replace fields of any part."""
    return _make_geometry


@pytest.fixture(scope="session")
def reference() -> draftmark.LoadedBackend:
    """Return the reference backend, loaded through its entry point."""
    return draftmark.load("reference")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: for tiny tensors on a busy machine a second thread is five times slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Process:
    """Result of a finished Python subprocess."""

    returncode: int
    out: str
    err: str


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Process]:
    """Return a function that runs a snippet in a new interpreter, with extra folders first on its path."""

    def run(code: str, *first_on_path: Path, **env: str) -> Process:
        path = os.pathsep.join([*map(str, first_on_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, **env},
            capture_output=True,
            text=True,
        )
        return Process(done.returncode, done.stdout, done.stderr)

    return run


@dataclass(frozen=True)
class CommandOutcome:
    """Exit code and output of a command line."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, parsed as one JSON object."""
        return json.loads(self.out)

    def assert_one_line_error(self, code: int, cause: str) -> None:
        """Assert that the command failed with one line on stderr that contains `cause`, and no traceback."""
        assert cause in self.err
        assert (self.code, self.out, self.err.count("\n")) == (code, "", 1), self.err
        assert "Traceback" not in self.err and "this is a bug" not in self.err


@pytest.fixture(name="draftmark")
def _draftmark(capsys: pytest.CaptureFixture[str]) -> Callable[..., CommandOutcome]:
    """Return a function that runs a command line in this process."""

    def run(*argv: object) -> CommandOutcome:
        code = main([str(word) for word in argv])
        captured = capsys.readouterr()
        return CommandOutcome(code, captured.out, captured.err)

    return run


class Terminal(io.StringIO):
    """Text stream that reports to be a terminal."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    @property
    def plain(self) -> str:
        """Text of the terminal, without colours."""
        return re.sub(r"\x1b\[[0-9;]*m", "", self.getvalue())


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], Terminal]:
    """Return a function (stream, columns) that replaces stdout or stderr by a terminal."""

    def make(stream: str, columns: int) -> Terminal:
        made = Terminal()
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, stream, made)
        return made

    return make


@pytest.fixture
def broken_torch(tmp_path: Path) -> Path:
    """Return a folder with a module `torch` that raises on import."""
    folder = tmp_path / "broken-torch"
    folder.mkdir()
    (folder / "torch.py").write_text("raise RuntimeError('libascend_hal.so: cannot open shared object file')\n")
    return folder


BACKEND_SOURCE = """from draftmark import BackendInfo, hookimpl
from draftmark_reference import ReferencePlugin

reference = ReferencePlugin()
globals().update({{name: getattr(reference, name) for name in dir(reference) if name.startswith("draftmark_")}})

@hookimpl
def draftmark_describe():
    return BackendInfo(**{info!r})
"""
"""Module of a whole backend: the reference's hooks under another name. Tests append code that breaks it."""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """Return a function that makes a temporary installed distribution with a backend, and returns its folder.

    `source` replaces the module's text, `extra` is appended to it, `info` replaces fields of its BackendInfo. `entries`
    replaces entry_points.txt, which by default names the module, or its class Plugin if it has one.
    """
    made: list[str] = []

    def make(
        backend: str,
        *,
        project: str | None = None,
        extra: str = "",
        source: str | None = None,
        entries: str | None = None,
        group: str = "draftmark.backends.v1",
        metadata: str = "Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n",
        **info: Any,
    ) -> Path:
        project = project or f"draftmark-{backend}"
        module = f"throwaway_{project.replace('-', '_')}"
        made.append(module)
        site = tmp_path / f"site{len(made)}"
        folder = site / f"{project.replace('-', '_')}-1.0.dist-info"
        folder.mkdir(parents=True)
        (site / module).mkdir()
        fields = {"name": backend, "device": "any", "contract_minor": 0, "host_kernels": True} | info
        text = (BACKEND_SOURCE.format(info=fields) if source is None else source) + "\n" + extra
        (site / module / "__init__.py").write_text(text)
        if metadata:
            (folder / "METADATA").write_text(metadata.format(project=project))
        target = f"{module}:Plugin" if "class Plugin" in text else module
        (folder / "entry_points.txt").write_text(entries or f"[{group}]\n{backend} = {target}\n")
        monkeypatch.syspath_prepend(str(site))
        return site

    yield make
    for module in made:
        sys.modules.pop(module, None)


# -- scenes: forwards in plain Python -------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """A tail slot (KV position of a new or draft token): its depth, and the tail slots that its row sees."""

    depth: int
    sees: frozenset[int]


def chain(n: int) -> tuple[Slot, ...]:
    """Return a chain of n tokens; each sees itself and all earlier tokens."""
    return tuple(Slot(s, frozenset(range(s + 1))) for s in range(n))


def block(n: int) -> tuple[Slot, ...]:
    """Return a block of n tokens; each sees all n."""
    return tuple(Slot(s, frozenset(range(n))) for s in range(n))


def tree(parents: list[int | None]) -> tuple[Slot, ...]:
    """Return tree slots from the parent of each slot; each sees its ancestors and itself."""
    slots = []
    for slot, parent in enumerate(parents):
        path = [slot]
        while parent is not None:
            path.append(parent)
            parent = parents[parent]
        slots.append(Slot(len(path) - 1, frozenset(path)))
    return tuple(slots)


@dataclass(frozen=True)
class Request:
    """A live request: `prefix` committed tokens, then a tail of new or draft tokens.

    The last `rows` slots of the tail are query rows.
    """

    prefix: int
    tail: tuple[Slot, ...]
    rows: int

    @property
    def total(self) -> int:
        """KV length: prefix plus tail slots."""
        return self.prefix + len(self.tail)


@dataclass(frozen=True)
class Scene:
    """Description of one forward of several requests, in plain Python, without tensors.

    `host` is the kind of prefix lengths that the host has: exact, upper_bound or unknown.
    """

    geometry: Geometry
    mode: Mode
    requests: tuple[Request, ...]
    step: int = 0
    padded_reqs: int = 0
    causal: bool = True
    host: str = "exact"
    seed: int = 0

    def visible(self, request: int, row: int) -> list[int]:
        """Return the KV indices that a row sees, by a brute-force check of every key."""
        r = self.requests[request]
        window = self.geometry.attention.window_left
        own = len(r.tail) - r.rows + row
        seen = []
        for key in range(r.total):
            in_tail = key >= r.prefix
            if in_tail and (key - r.prefix) not in r.tail[own].sees:
                continue
            position = r.prefix + r.tail[key - r.prefix].depth if in_tail else key
            distance = r.prefix + r.tail[own].depth - position
            if window == -1 or distance <= window:
                seen.append(key)
        return seen

    def rows(self) -> list[tuple[int, int]]:
        """Return (request, row) of every live query row, in batch order."""
        return [(i, j) for i, r in enumerate(self.requests) for j in range(r.rows)]


class PagedScene:
    """Puts the requests of a `Scene` into shuffled KV pages, and runs a backend on them.

    Unused KV is NaN. Each batch buffer contains stale numbers after its live part.

    Attributes:
        batch: the forward, over buffers that start with invalid numbers.
        cache: KV of prefix and older tail slots; the rows of this forward are not stored yet.
        k, v: expected KV, one ``[prefix + tail, num_kv_heads, head_dim]`` tensor per request, and ``[…, value_width]``.
    """

    def __init__(self, scene: Scene, k: list[torch.Tensor], v: list[torch.Tensor]) -> None:
        self.scene, self.k, self.v = scene, k, v
        geometry, rng = scene.geometry, random.Random(scene.seed)
        a = geometry.attention
        self.table = self._place(rng)
        self.num_pages = 3 + sum(len(pages) for pages in self.table)
        self.batch = validate(self._batch(rng), geometry)
        self.cache, truths = self._unwritten(a.latent, Form.LATENT_PARTS in geometry.forms)
        for pages, truth in truths:
            pages[0] = 0.0
            for i, r in enumerate(scene.requests):
                old = r.total - r.rows
                if old:
                    stored = truth[i][:old].to(pages.dtype)
                    pages.flatten(0, 1)[self.slots(i, range(old))] = stored.view(old, *pages.shape[2:])

    def _unwritten(self, latent: bool, parts: bool) -> tuple[KVCache, list[tuple[torch.Tensor, list[torch.Tensor]]]]:
        """Return a cache of NaN, and each tensor of it with the expected KV that it stores, by request."""
        a = self.scene.geometry.attention
        width = a.value_width

        def nan(*rest: int) -> torch.Tensor:
            return torch.full((self.num_pages, a.page_size, *rest), float("nan"), dtype=getattr(torch, a.kv_dtype))

        if parts:
            cache = KVCache.latent((nan(width), nan(a.head_dim - width)))
            halves = [k[..., :width] for k in self.k], [k[..., width:] for k in self.k]
            return cache, list(zip(cache.parts, halves, strict=True))
        if latent:
            cache = KVCache.latent(nan(a.head_dim), value_dim=width)
            return cache, [(cache.k, self.k)]
        cache = KVCache(nan(a.num_kv_heads, a.head_dim), nan(a.num_kv_heads, width))
        return cache, [(cache.k, self.k), (cache.v, self.v)]

    def slots(self, request: int, keys: range) -> torch.Tensor:
        """Return the KV slots of a request's keys."""
        size = self.scene.geometry.attention.page_size
        return torch.tensor([self.table[request][key // size] * size + key % size for key in keys])

    def own_rows(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return K and V of this forward's rows for `write_kv`; padding rows get arbitrary finite numbers."""

        def rows(truth: list[torch.Tensor]) -> torch.Tensor:
            pad = torch.ones(self.batch.num_rows - len(self.scene.rows()), *truth[0].shape[1:])
            own = [truth[i][r.total - r.rows :] for i, r in enumerate(self.scene.requests)]
            return torch.cat([*own, pad]).to(dtype)

        return rows(self.k), None if self.scene.geometry.attention.latent else rows(self.v)

    def run(self, backend: BoundBackend, q: torch.Tensor, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Call the backend's four methods and return `out`, which starts as NaN; write `lse` if it is given."""
        k, v = self.own_rows(q.dtype)
        out = torch.full((*q.shape[:2], self.scene.geometry.attention.value_width), float("nan"), dtype=q.dtype)
        backend.plan(self.batch)
        backend.write_metadata(self.batch)
        backend.write_kv(k, v, self.cache, self.batch)
        backend.attend(q, self.cache, self.batch, out, *[] if lse is None else [lse])
        return out

    def _place(self, rng: random.Random) -> list[list[int]]:
        size = self.scene.geometry.attention.page_size
        counts = [-(-r.total // size) for r in self.scene.requests]
        ids = list(range(1, 1 + sum(counts)))
        rng.shuffle(ids)
        return [[ids.pop() for _ in range(count)] for count in counts]

    def _batch(self, rng: random.Random) -> ForwardBatch:
        scene, geometry = self.scene, self.scene.geometry
        live = len(scene.requests)
        padded = scene.padded_reqs or live
        dirty = BatchBuffers(geometry, "cpu")
        dirty.prefix_lens.fill_(10**6)
        dirty.page_table.fill_(self.num_pages - 1)
        dirty.mask.fill_(-1)
        dirty.depth.fill_(10**6)
        dirty.positions.fill_(10**6)
        prefix = [r.prefix for r in scene.requests] + [0] * (padded - live)
        dirty.prefix_lens[:padded] = torch.tensor(prefix)
        dirty.page_table[live:padded] = 0
        for i, pages in enumerate(self.table):
            dirty.page_table[i, : len(pages)] = torch.tensor(pages)
            stale = [rng.randrange(1, self.num_pages) for _ in range(geometry.max_pages_per_req - len(pages))]
            dirty.page_table[i, len(pages) :] = torch.tensor(stale)
        host = host_lengths(scene)
        if scene.mode is Mode.EXTEND:
            q_lens = tuple(r.rows for r in scene.requests) + (0,) * (padded - live)
            lists = dirty.chosen and Chosen(dirty.chosen.slots[: sum(q_lens)], dirty.chosen.counts[: sum(q_lens)])
            placed = dirty.prefix_lens[:padded], dirty.page_table[:padded]
            return ragged(geometry, *placed, q_lens, host, live, chosen=lists)
        if scene.mode is Mode.RAGGED_VERIFY:
            budget, indptr = geometry.max_rows(scene.mode), [0]
            for n in [r.rows for r in scene.requests] + [0] * (padded - live):
                indptr.append(indptr[-1] + n)
            dirty.q_indptr[: padded + 1] = torch.tensor(indptr)
            batch = dirty.ragged_verify(budget, live, host, tree=not scene.causal, padded_reqs=padded)
        else:
            batch = dirty.uniform(scene.mode, scene.step, padded, live, host, tree=not scene.causal)
        self._fill(batch)
        return batch

    def _fill(self, batch: ForwardBatch) -> None:
        scene, wall = self.scene, self.scene.geometry.limits.max_context_len - 1
        q, t = batch.q_lens[0], batch.tail_lens[0]
        tails = [(r.prefix, r.tail, r.rows) for r in scene.requests]
        if scene.mode is not Mode.RAGGED_VERIFY:
            alone = tuple(Slot(s, frozenset({s})) for s in range(t))
            tails += [(0, alone, q)] * (batch.padded_reqs - len(tails))
        rows = [(prefix, slot) for prefix, tail, own in tails for slot in tail[len(tail) - own :]]
        batch.positions[: len(rows)] = torch.tensor([min(prefix + slot.depth, wall) for prefix, slot in rows]).long()
        if not scene.causal and rows:
            words = range(scene.geometry.mask_words)
            bits = [sum(1 << s for s in slot.sees) for _, slot in rows]
            packed = torch.tensor([[(b >> 32 * w) & 0xFFFFFFFF for w in words] for b in bits])
            batch.tail.mask[: len(rows)] = torch.where(packed >= 2**31, packed - 2**32, packed)
            if scene.mode is Mode.RAGGED_VERIFY:
                batch.tail.depth[: len(rows)] = torch.tensor([slot.depth for _, slot in rows])
            else:
                batch.tail.depth[:] = torch.tensor([[slot.depth for slot in tail] for _, tail, _ in tails])


def host_lengths(scene: Scene) -> HostLengths:
    """Return the host's view of the live prefix lengths, of the kind `scene.host`."""
    limit = scene.geometry.max_prefix_len
    true = tuple(r.prefix for r in scene.requests)
    if scene.host == "unknown":
        return Unknown(len(true), limit)
    if scene.host == "upper_bound":
        return UpperBound(tuple(min(n + scene.geometry.draft.num_draft_tokens, limit) for n in true))
    return Exact(true)


TAILS = (1, 2, 3, 5, 8, 31, 32, 33, 40)
"""Values of num_draft_tokens, with sizes around multiples of a 32-bit mask word."""


@st.composite
def scenes(draw: st.DrawFn, mode: Mode, tails: tuple[int, ...] = TAILS, **fields: Any) -> Scene:
    """Draw a valid `Scene` of one mode. Trees and pages come from one drawn seed: drawing each number is slower."""
    k = draw(st.sampled_from((1, 2, 3, 4)))
    steps = draw(st.integers(2 if mode is Mode.DRAFT else 1, 4))
    d = draw(st.sampled_from(tails))
    live = draw(st.integers(1, 3))
    geometry = _make_geometry(
        page_size=draw(st.sampled_from((1, 3, 4, 16))),
        window_left=draw(st.sampled_from((-1, -1, 0, 1, 2, 5, 11, 30))),
        max_context_len=draw(st.integers(4, 24)),
        overlap=draw(st.booleans()),
        topk=k,
        num_steps=steps,
        num_draft_tokens=d,
        max_num_reqs=live,
        capture_batch_sizes=(live + draw(st.integers(0, 2)),),
        block_size=d if mode is Mode.DRAFT_BLOCK else 1,
        row_budgets=(draw(st.integers(1, live * d + 3)),),
        modes=tuple(Mode),
        **fields,
    )
    step = draw(st.integers(0, steps - 2)) if mode is Mode.DRAFT else 0
    rng = random.Random(seed := draw(st.integers(0, 2**20)))
    wall = geometry.limits.max_context_len
    longest = wall - 1 if mode is Mode.EXTEND else wall + (d if geometry.limits.overlap else 0)
    prefixes = [draw(st.integers(0, longest)) for _ in range(live)]
    treed = (Mode.VERIFY, Mode.DRAFT, Mode.RAGGED_VERIFY)
    causal = mode not in treed or ((mode is not Mode.DRAFT or k == 1) and draw(st.booleans()))
    shape = draw(st.sampled_from(("tree", "tree", "arbitrary")))
    requests, room, budget = [], geometry.limits.max_extend_tokens, geometry.limits.row_budgets[0]
    for i, prefix in enumerate(prefixes):
        if mode is Mode.EXTEND:
            n = draw(st.integers(1, min(wall - prefix, room - (live - 1 - i))))
            room -= n
            requests.append(Request(prefix, chain(n), n))
        elif mode is Mode.DRAFT:
            tail = chain(step + 1) if causal else _beams(rng, k, step)
            requests.append(Request(prefix, tail, k))
        elif mode is Mode.DRAFT_BLOCK:
            requests.append(Request(prefix, block(d), d))
        elif mode is Mode.RAGGED_VERIFY:
            n = draw(st.integers(0, min(d, budget)))
            budget -= n
            requests.append(Request(prefix, chain(n) if causal or not n else _drafted(rng, n, shape), n))
        else:
            n = 1 if mode is Mode.DECODE else d
            tail = chain(n) if causal else _drafted(rng, n, shape)
            requests.append(Request(prefix, tail, n))
    host = draw(st.sampled_from(("exact", "upper_bound", "unknown")))
    return Scene(geometry, mode, tuple(requests), step, geometry.max_reqs, causal, host, seed)


def _beams(rng: random.Random, k: int, step: int) -> tuple[Slot, ...]:
    """Return k tail slots per draft step, each with a random parent in the step before, like a beam search."""
    parents: list[int | None] = [None] * k
    for level in range(1, step + 1):
        parents += [rng.randrange((level - 1) * k, level * k) for _ in range(k)]
    return tree(parents)


def _drafted(rng: random.Random, n: int, shape: str) -> tuple[Slot, ...]:
    """Return n random tail slots: arbitrary mask bits and depths if `shape` is "arbitrary", otherwise a tree.

    The last slots of a tree may be unused; their parent is the root.
    """
    if shape == "arbitrary":
        bits = [frozenset({s} | {t for t in range(n) if rng.random() < 0.5}) for s in range(n)]
        return tuple(Slot(rng.randrange(n), seen) for seen in bits)
    used = rng.randint(1, n)
    return tree([None] + [rng.randrange(s) if s < used else 0 for s in range(1, n)])


@pytest.fixture(scope="session")
def scene_types() -> SimpleNamespace:
    """Return this file's scene classes and functions.

    A fixture provides them, because test modules cannot import this file with `--import-mode=importlib`.
    """
    return SimpleNamespace(
        Request=Request,
        Scene=Scene,
        PagedScene=PagedScene,
        Slot=Slot,
        block=block,
        chain=chain,
        tree=tree,
        scenes=scenes,
    )


@pytest.fixture(scope="session")
def expected_attention() -> Callable[..., np.ndarray]:
    """Return a function that computes the attention of every live row in float64, one dot product at a time.

    The function returns ``[rows, num_qo_heads, value_width]``.
    """

    def attend(scene: Scene, q: torch.Tensor, k: list[torch.Tensor], v: list[torch.Tensor]) -> np.ndarray:
        a = scene.geometry.attention
        out = np.zeros((len(scene.rows()), a.num_qo_heads, a.value_width))
        queries, keys, values = q.double().numpy(), [t.double().numpy() for t in k], [t.double().numpy() for t in v]
        for row, (request, own) in enumerate(scene.rows()):
            visible = scene.visible(request, own)
            for head in range(a.num_qo_heads if visible else 0):
                shared = head * a.num_kv_heads // a.num_qo_heads
                logits = [a.softmax_scale * float(queries[row, head] @ keys[request][key, shared]) for key in visible]
                if a.logits_soft_cap:
                    logits = [a.logits_soft_cap * math.tanh(x / a.logits_soft_cap) for x in logits]
                top = max(logits)
                weights = [math.exp(x - top) for x in logits]
                total = sum(weights)
                for key, weight in zip(visible, weights, strict=True):
                    out[row, head] += weight / total * values[request][key, shared]
        return out

    return attend


@pytest.fixture(scope="session")
def random_paged_scene() -> Callable[[Scene], tuple[PagedScene, torch.Tensor]]:
    """Return a function that turns a `Scene` into a `PagedScene` with random K and V, and random q for its rows."""

    def make(scene: Scene) -> tuple[PagedScene, torch.Tensor]:
        a, dice = scene.geometry.attention, torch.Generator().manual_seed(scene.seed)

        def numbers(rows: int, heads: int) -> torch.Tensor:
            return torch.randn(rows, heads, a.head_dim, generator=dice).to(getattr(torch, a.q_dtype))

        k, v = ([numbers(r.total, a.num_kv_heads) for r in scene.requests] for _ in range(2))
        v = [(keys if a.latent else values)[..., : a.value_width] for keys, values in zip(k, v, strict=True)]
        paged = PagedScene(scene, k, v)
        return paged, numbers(paged.batch.num_rows, a.num_qo_heads)

    return make


@pytest.fixture(scope="session")
def open_reference(reference: draftmark.LoadedBackend) -> Callable[[Geometry], tuple[AttentionBackend, Arena]]:
    """Return a function (geometry) that allocates a guarded, poisoned arena and binds the reference backend to it.

    The function returns the backend and the arena.
    """

    def opened(geometry: Geometry) -> tuple[AttentionBackend, Arena]:
        arena = Arena.allocate(reference.buffers(geometry), "cpu", guard=True)
        return ReferenceBackend(geometry, arena), arena

    return opened
