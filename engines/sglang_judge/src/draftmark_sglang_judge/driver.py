"""Execution of scenes (forwards of the judge) on SGLang's attention backends.

Each backend is a new object on the KV pools of a running scheduler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from draftmark import Mode
from draftmark_contract.check import Refused, Unjudged
from draftmark_contract.judge.devices import device_of

from .batches import forward_batch
from .outside import DRAFTS, create
from .requests import Placed, place
from .setups import LARGEST, MLA, ON_A_CPU, Heads, Scene, Setup, heads_on

TRAP = 1000.0
"""Contents of KV slots that no row may see; a row that attends to one has a large error."""
Patch = Callable[[Any], Any]
"""Function from a backend's class to the class to judge. Tests of the checks use it to make faulty backends."""


def unpatched(kind: Any) -> Any:
    """Return the backend class unchanged. Tests use other patches, which add a defect to the class."""
    return kind


@dataclass
class ForwardResult:
    """Tensors of one forward, on the CPU.

    Attributes:
        placed: requests of the forward, with their KV slots.
        step: index of the draft step; 0 in other modes.
        q, k, v, out: ``[rows, heads, head_dim]``; v and out ``[…, value_width]``. `out` as the backend returned it.
        before, after: K and V of the pool before and after the forward, ``[slots, kv_heads, …]``.
        writes: the KV slot in which each row is stored.
        heads: attention heads and dtype of q, k and v.
    """

    placed: Placed
    step: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    before: tuple[torch.Tensor, torch.Tensor]
    after: tuple[torch.Tensor, torch.Tensor]
    writes: list[int]
    heads: Heads = ON_A_CPU


class Driver:
    """Creates SGLang's attention backends in one running scheduler, and runs scenes (forwards) on them.

    Args:
        scheduler: SGLang's `Scheduler`.
        setup: server that the scheduler was started for.
        patch: function from SGLang's backend class to the class that is judged.
        device: torch device of the scheduler.
        target: the judge's name of the backend.
        outside: SGLang's name of a backend from outside; "" for SGLang's own.
    """

    def __init__(
        self,
        scheduler: Any,
        setup: Setup,
        patch: Patch = unpatched,
        device: str = "cpu",
        target: str = "",
        outside: str = "",
    ) -> None:
        self.setup, self.scheduler, self._patch, self.device, self.target = setup, scheduler, patch, device, target
        self._outside = outside
        self.heads = heads_on(device, target)
        self._target = scheduler.tp_worker.model_runner
        self._worker: Any = getattr(scheduler.draft_worker, "_draft_worker", None) if setup.speculates else None
        self._draft = getattr(self._worker, "draft_runner", None)

    def runner(self, mode: Mode) -> Any:
        """Return SGLang's `ModelRunner` of a mode: the target's or the draft model's."""
        return self._draft if mode in (Mode.DRAFT, Mode.DRAFT_EXTEND) else self._target

    def backend(self, mode: Mode, window: int = -1) -> Any:
        """Create a new backend of SGLang's class for a mode, on SGLang's runner with this sliding window.

        Raises:
            Refused: its constructor rejects the setup, so SGLang's server would not start.
            Unjudged: the mode runs another class than the judged one.
        """
        if self._outside and mode in (Mode.DRAFT, Mode.DRAFT_EXTEND):
            raise Unjudged(DRAFTS)
        runner = self.runner(mode)
        runner.sliding_window_size = window if window >= 0 else None
        made = {Mode.DRAFT: "draft_attn_backend", Mode.DRAFT_EXTEND: "draft_extend_attn_backend"}
        of = getattr(self._worker, made[mode]) if mode in made else runner.attn_backend
        shape = (self.setup.topk, self.setup.num_steps) if mode is Mode.DRAFT else ()
        try:
            if self._outside:
                return create(self._outside, runner)
            return self._patch(type(of))(runner, *shape)
        except (AssertionError, NotImplementedError) as error:
            raise Refused(f"its constructor rejects the setup: {type(error).__name__} {error}".rstrip()) from error

    def synchronize(self) -> None:
        """Wait for the device, so that an asynchronous error is reported for the check that caused it."""
        home = device_of(self.device)
        if not home.host:
            home.synchronize()

    def place(self, scene: Scene) -> Placed:
        """Prepare a scene (one forward to run): assign KV pages, write `req_to_token`, and fill the KV pool."""
        runner = self.runner(scene.mode)
        pool, table = runner.token_to_kv_pool, runner.req_to_token_pool.req_to_token
        placed = place(scene, self.setup, pool.get_key_buffer(0).shape[0] // self.setup.page_size)
        table.zero_()
        for n, slots in enumerate(placed.slots):
            table[n + 1, : len(slots)] = torch.tensor(slots, dtype=table.dtype)
        make = torch.Generator().manual_seed(scene.seed)
        # The rows of MLA layers are keys, and their values are a view of them.
        for buffer in (pool.get_key_buffer(0), *(() if self.heads.value_dim else (pool.get_value_buffer(0),))):
            buffer.fill_(TRAP)
            buffer[0] = 0.0
            for one, slots in zip(placed.requests, placed.slots, strict=True):
                prefix = torch.tensor(slots[: one.prefix], dtype=torch.int64)
                buffer[prefix.to(buffer.device)] = torch.randn(len(prefix), *buffer.shape[1:], generator=make).to(
                    buffer
                )
            for slot, copied in placed.copied:
                buffer[copied] = buffer[slot]
        return placed

    def batch(self, placed: Placed, padded: int | None = None) -> Any:
        """Return SGLang's `ForwardBatch` of the placed requests, on the device; see `forward_batch`."""
        with torch.device(self.device):
            return forward_batch(placed, self.runner(placed.scene.mode), padded)

    def run_eager(self, scene: Scene, backend: Any) -> list[ForwardResult]:
        """Run one forward, or all steps of one draft round, in eager mode."""
        placed = self.place(scene)
        batch = self.batch(placed)
        backend.init_forward_metadata(batch)
        if scene.mode is Mode.DRAFT:
            return [self.step(placed, backend.attn_backends[i], batch, i) for i in range(self.setup.num_steps - 1)]
        return [self.step(placed, backend, batch, 0)]

    def layer(self, scene: Scene) -> Any:
        """Create SGLang's `RadixAttention` layer with a scene's sliding window and logits cap."""
        from sglang.srt.layers.radix_attention import RadixAttention

        return RadixAttention(
            self.heads.num_qo_heads,
            self.heads.head_dim,
            self.heads.scale,
            self.heads.num_kv_heads,
            0,
            v_head_dim=self.heads.value_width,
            logit_cap=scene.soft_cap,
            sliding_window_size=scene.window,
        )

    def step(self, placed: Placed, backend: Any, batch: Any, step: int) -> ForwardResult:
        """Run one forward, or one draft step, with random q, k and v."""
        scene = placed.scene
        if scene.mode is Mode.DRAFT:
            batch = step_of(batch, self.setup, step)
        count = len(batch.out_cache_loc)
        make = torch.Generator().manual_seed(1000 + scene.seed + step)
        counts = (self.heads.num_qo_heads, self.heads.num_kv_heads, self.heads.num_kv_heads)
        dtype = getattr(torch, self.heads.dtype)
        q, k, v = (torch.randn(count, one, self.heads.head_dim, generator=make).to(dtype) for one in counts)
        v = k[..., : self.heads.value_dim] if self.heads.value_dim else v
        pool = self.runner(scene.mode).token_to_kv_pool
        before = _copies(pool)
        writes = batch.out_cache_loc.tolist()
        on_device = [one.to(self.device) for one in (q, k, v)]
        out = self.forward(backend, scene, on_device[0], on_device[1], on_device[2], batch).cpu()
        return ForwardResult(placed, step, q, k, v, out, before, _copies(pool), writes, self.heads)

    def forward(
        self, backend: Any, scene: Scene, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, batch: Any
    ) -> torch.Tensor:
        """Call a layer's attention as SGLang's models do; returns ``[rows, num_qo_heads, value_width]``.

        MLA models pass both parts of queries and rows to some backends (`FORWARD_ABSORB_CORE_ATTENTION_BACKENDS`).
        """
        decodes = scene.mode in (Mode.DECODE, Mode.DRAFT)
        call = backend.forward_decode if decodes else backend.forward_extend
        parts: dict[str, torch.Tensor] = {}
        width = self.heads.value_dim
        if width and self._takes_parts():
            parts = {"q_rope": q[..., width:].contiguous(), "k_rope": k[..., width:].contiguous()}
            q, k = q[..., :width], k[..., :width]
        out: torch.Tensor = call(q.reshape(len(q), -1).clone(), k.clone(), v.clone(), self.layer(scene), batch, **parts)
        return out.view(len(q), self.heads.num_qo_heads, self.heads.value_width).clone()

    def _takes_parts(self) -> bool:
        from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS

        return MLA[self.target] in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def _copies(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return CPU copies of the K and V pools of the model's only layer."""
    return pool.get_key_buffer(0).clone().cpu(), pool.get_value_buffer(0).clone().cpu()


def step_of(batch: Any, setup: Setup, step: int) -> Any:
    """Return the batch that SGLang's draft loop passes to a step, with the step's slots and positions."""
    one = copy.copy(batch)
    slots = batch.out_cache_loc.view(batch.batch_size, setup.topk, setup.num_steps)
    one.out_cache_loc = slots[:, :, step].reshape(-1).contiguous()
    one.positions = batch.positions + step
    return one


class Graph:
    """Emulates a CUDA graph: replays run on the metadata objects that existed at capture.

    A replay calls `init_forward_metadata_out_graph`, then runs the kernels on the tensors and Python numbers that the
    backend held at capture. Data that a replay writes to other tensors is lost, on a CPU as in a real CUDA graph.
    """

    def __init__(self, driver: Driver, mode: Mode, window: int = -1) -> None:
        self.driver, self.mode, self.window = driver, mode, window
        self.backend = driver.backend(mode, window)
        setup = driver.setup
        rows = {Mode.DECODE: 1, Mode.DRAFT: setup.topk}.get(mode, setup.num_draft_tokens)
        self.backend.init_cuda_graph_state(LARGEST, LARGEST * rows)
        self._static: Any = None
        self._bound: list[Any] = []

    @property
    def _parts(self) -> list[Any]:
        return list(self.backend.attn_backends) if self.mode is Mode.DRAFT else [self.backend]

    def capture(self) -> list[ForwardResult]:
        """Run the forward of a capture, which has padding requests only as in SGLang, and return its results."""
        placed = self.driver.place(Scene("capture", self.mode, (), tree="chain", window=self.window))
        self._static = self.driver.batch(placed, LARGEST)
        self.backend.init_forward_metadata_out_graph(self._static, in_capture=True)
        self._in_graph(self._static)
        self._bound = [copy.copy(part.forward_metadata) for part in self._parts]
        return self._run(placed)

    def replay(self, scene: Scene) -> list[ForwardResult]:
        """Copy a scene's batch, padded, to the static inputs, prepare metadata, and run the captured forward."""
        placed = self.driver.place(scene)
        view = self.driver.batch(placed, LARGEST)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc", "positions"):
            getattr(self._static, name).copy_(getattr(view, name))
            setattr(view, name, getattr(self._static, name))
        view.num_padding = LARGEST - len(scene.prefixes)
        self.backend.init_forward_metadata_out_graph(view)
        return self._run(placed)

    def _in_graph(self, batch: Any) -> None:
        if hasattr(self.backend, "init_forward_metadata_in_graph"):
            self.backend.init_forward_metadata_in_graph(batch)

    def _run(self, placed: Placed) -> list[ForwardResult]:
        ran = []
        self._in_graph(self._static)
        for step, (part, bound) in enumerate(zip(self._parts, self._bound, strict=True)):
            part.forward_metadata = copy.copy(bound)
            ran.append(self.driver.step(placed, part, self._static, step))
        return ran
