"""draftmark's own Triton kernels for NVIDIA GPUs: attention for prefill, decode, draft and tree verification.

The prefix is read once for all rows of a request and all query heads of a group. Only the last tiles apply the tree
mask. Without a GPU the same kernels run on CPU tensors in Triton's interpreter, for correctness.

Layout (path, and its counterpart in FlashAttention-3 or DeepGEMM):

    backend.py                        the four methods of a step (plan, write_metadata, write_kv, attend)
    decode_verify.py                  decode, verify and draft modes: chooses a plan, launches attention and combine
    prefill.py, prefill_fp8.py        EXTEND; over e4m3 with K and V upcast first
    chosen.py                         every mode of layers with chosen keys (sparse attention)
    kv_write.py, tree_ops.py          KV scatter (append_kv), tree tail, tree verification, KV compaction
    sizing.py, support.py             buffers by name and size; rejected geometries
    explain.py                        each choice of a batch's kernels, with its reason
    kernel_list.py, kernel_spec.py    every compiled kernel of a geometry, listed and compiled without a GPU
    kernel_variants.py                `kernels` compiled for a GPU, or interpreted for CPU tensors; the package
                                      draftmark_triton_interpreter, if installed, makes that faster
    heuristics/                       kernel selection (FA3 tile_size.h, heuristics.h; DeepGEMM jit_kernels/heuristics)
        select.py, common.py          select_config: batch -> KernelConfig
        sm80.py, sm90.py              block sizes, stages and warp groups for any GPU; for Hopper
        latent.py, chosen.py          block sizes and stages for latent rows (MLA); splits of lists of keys
        split_kv.py, upcast.py        num_splits (num_splits_heuristic); when prefill upcasts e4m3
    compiled/                         compiled kernels, ready before the first request
        source.py, store.py           a kernel as plain data with a key; the folder of compiled kernels
        pool.py, worker.py            compilation in parallel processes
        prepare.py, loading.py        what opening a backend compiles and loads; what a launch finds
    launch/                           host launch code (FA3 flash_api.cpp, DeepGEMM jit)
        attention.py, combine.py, metadata.py, upcast.py, chosen.py      a kernel's grid, arguments, constants
        operands.py                   tensors of a call by name; parameters and extents that launches share
        tma.py                        TMA descriptors of the paged cache
        launcher.py, relaunch.py      launch without Triton's binding; recorded launches, repeated per layer
        cuda_driver.py, parameters.py launches through the CUDA driver API
    kernels/                          Triton, any GPU from sm_80
        decode_verify.py, prefill.py  attention kernels
        mainloop.py, latent.py        mainloops, of keys and of latent rows (MLA), from tile.py, mask.py and softmax.py
        chosen.py                     attention over each row's own list of keys
        fp8_ds_mla.py                 tiles of latent rows of 656 bytes, for both
        tile_schedule.py, prefill_schedule.py, split_kv.py            schedule on the device (FA3 prepare_scheduler)
        combine.py                    combine of the splits (FA3 flash_fwd_combine)
        upcast_kv.py, kv_write.py     e4m3 -> dtype of q; KV scatter
        state_*.py                    convolution, recurrence and commit of layers with recurrent state
    kernels_sm90/                     Gluon, Hopper
        decode_verify.py, decode_verify_fp8.py, prefill.py      kernels (FA3 flash_fwd_kernel_sm90)
        decode_verify_gather.py, prefill_gather.py              kernels for pages that TMA cannot load (paged_kv)
        latent*.py, latent_rs*.py     latent rows (MLA), with q in shared memory, and in registers
        warp_specialize.py            producer and consumer warp groups, their registers
        producer*.py, pipeline.py     loads by TMA or cp.async, upcast; full and empty barriers of the stages
        mainloop.py, mma_fp8_swap_ab.py                         mainloop_fwd_sm90; e4m3 with operands swapped
        mask.py, softmax.py, pack_gqa.py, epilogue.py           as in FA3
        tile_scheduler.py             dynamic persistent scheduler of prefill (DynamicPersistentTileScheduler)
    state/                            layers with recurrent state: launches, buffers
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from draftmark import (
    CONTRACT_MINOR,
    ROW_FORMATS,
    BackendInfo,
    BackendPlugin,
    BatchSize,
    Form,
    Geometry,
    KernelChoice,
    Mode,
    Progress,
    Recurrence,
    StateGeometry,
    WarmedKernels,
)

from . import sizing
from .state.sizing import state_buffers
from .state.support import state_reasons_against
from .support import reasons_against

if TYPE_CHECKING:
    import torch

    from draftmark.runtime import Arena, AttentionBackend, StateBackend, TreeOps


class TritonPlugin(BackendPlugin):
    """Backend of our own Triton kernels. The schedule is computed on the device, so no host lengths are needed."""

    info = BackendInfo(
        name="cuda_triton",
        device="cuda",
        contract_minor=CONTRACT_MINOR,
        host_kernels=True,
        runtime=("triton",),
        install="pip install 'triton>=3.6,<3.10'",
        modes=tuple(Mode),
        forms=tuple(Form),
        sinks=True,
        latent=True,
        chosen_keys=True,
        row_formats=ROW_FORMATS,
        narrow_values=True,
        lse=True,
        batch_invariant=True,
        recurrences=tuple(Recurrence),
        summary="own Triton kernels: prefix once, tail masked, device-built schedule",
    )
    supports = staticmethod(reasons_against)
    buffers = staticmethod(sizing.buffers)
    state_supports = staticmethod(state_reasons_against)
    state_buffers = staticmethod(state_buffers)

    def open_backend(self, geometry: Geometry, arena: Arena) -> AttentionBackend:
        """Open the backend over the arena's buffers, with every kernel of the geometry compiled and loaded.

        CPU tensors are processed in Triton's interpreter.
        """
        from .backend import TritonBackend
        from .compiled import prepare

        prepare.prepare(geometry, arena[sizing.SLOTS].device)
        return TritonBackend(geometry, arena)

    def warm(self, geometries: Sequence[Geometry | StateGeometry], progress: Progress) -> WarmedKernels | None:
        """Compile every kernel of the geometries that the store lacks, in parallel processes, without a GPU."""
        from .compiled.prepare import store_kernels
        from .kernel_list import kernels_of
        from .state.kernel_list import state_calls_of
        from .switches import is_tested_triton

        if not is_tested_triton():
            return None
        specs = [
            spec
            for one in geometries
            for spec in (state_calls_of(one) if isinstance(one, StateGeometry) else kernels_of(one))
        ]
        return store_kernels(specs, progress)

    def explain(self, geometry: Geometry, batch: BatchSize) -> list[KernelChoice]:
        """Return the choices that lead to the kernels of a batch, and the place of their compiled code."""
        from .explain import explain

        return explain(geometry, batch)

    def tree_ops(self, geometry: Geometry, device: torch.device) -> TreeOps:
        """Return the tree operations: write_tail, verify_tree and compact, one launch each."""
        from .compiled import prepare
        from .tree_ops import TritonTreeOps

        prepare.prepare(geometry, device, trees=True)
        return TritonTreeOps(geometry)

    def open_state(self, geometry: StateGeometry, arena: Arena) -> StateBackend:
        """Open the state backend over the arena's buffers, with every kernel of the geometry compiled and loaded.

        CPU tensors are processed in Triton's interpreter.
        """
        from .compiled import prepare
        from .state import sizing as state_sizing
        from .state.backend import TritonState

        prepare.prepare_state(geometry, arena[state_sizing.CHANNELS].device)
        return TritonState(geometry, arena)
