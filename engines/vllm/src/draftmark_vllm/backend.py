"""What vLLM's selector asks: names, capabilities, the layout of KV. Importing this refuses an unsupported vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from draftmark import Form
from draftmark_engines import EngineError

from .limits import chosen_backend, engine_limits, is_fp8, layer_shape, profile_of, serves_trees
from .options import refused_option
from .pages import head_slots
from .registration import check_claim
from .served import OTHER_BACKEND, Geometries
from .versions import VLLM

VLLM.require()
check_claim()


class DraftmarkBackend(AttentionBackend):  # type: ignore[misc]
    """draftmark in vLLM's slot CUSTOM. It writes KV in its forward, and refuses what no backend of draftmark serves."""

    # Of the adapter; `supports_combination` asks the backend that serves.
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", "fp8", "fp8_e4m3"]
    forward_includes_kv_cache_update: bool = True
    # K apart from V, for a backend that takes no views of packed pages. vLLM asks about the layout without a
    # configuration, and asks behind `supports_combination`, in each of its processes.
    kv_apart: ClassVar[bool] = False

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse vLLM's wrappers, which change each step for a kind of layer: prefixes that see ahead, sinks that are
        tokens, readers of another model's KV. That of chunks cuts requests into more, so it is served.
        """
        super().__init_subclass__(**arguments)
        kind = cls.__name__.removesuffix(DraftmarkBackend.__name__).strip("_")
        if not kind.startswith("ChunkedLocalAttention"):
            raise EngineError(f"the model has layers of vLLM's kind {kind}, which is not served; {OTHER_BACKEND}")

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enum that stands for a backend from outside."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> Any:
        """What runs a layer."""
        from .impl import DraftmarkImpl

        return DraftmarkImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """What prepares a step."""
        from .builder import DraftmarkBuilder

        return DraftmarkBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Page sizes. vLLM asks with a spec since 0.31."""
        return [MultipleOf(16)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Multiples of 16, whatever else vLLM's rule lets through."""
        return block_size is None or block_size % 16 == 0

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """In positions, layer by layer."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Where the backend that serves counts them; `supports_combination` asks it."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: the runs of a step are cut by the host's row counts."""
        return False

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        *rest: Any,
        **more: Any,
    ) -> str | None:
        """Ask the chosen backend whether it serves the model's shape; its reasons reach vLLM's message."""
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        config = get_current_vllm_config()
        refused = refused_option(config)
        if refused is not None:
            return refused
        model = config.model_config
        parallel = config.parallel_config
        try:
            backend = chosen_backend(config, current_platform.device_type)
            shape = layer_shape(
                model.get_num_attention_heads(parallel),
                model.get_num_kv_heads(parallel),
                head_size,
                block_size,
                dtype,
                kv_cache_dtype,
                sinks=has_sink,
            )
            made = Geometries.of(backend, shape, engine_limits(config), profile_of(current_platform.device_type))
        except EngineError as error:
            return str(error)
        cls.kv_apart = Form.STRIDED_KV not in made.few.forms
        if serves_trees(config) and not made.ragged:
            return f"backend {backend.info.name} has no RAGGED_VERIFY, which trees need; leave --worker-cls out"
        return None

    # -- layout of KV since 0.29, and what 0.28 asks of it ----------------------------------------------

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Layer by layer, page by page, token by token; or in each layer K of all pages and then V."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LHBNC if cls.kv_apart else KVCacheLayout.LBNHC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Of a token K heads first, then V heads, or all K in one slot and all V in another; see `pages`."""
        if spec.head_size != spec.head_size_v:
            raise EngineError(
                f"heads of K have {spec.head_size} elements and those of V {spec.head_size_v}, but as many are served "
                f"alone; {OTHER_BACKEND}"
            )
        if spec.state_content_bytes is not None:
            return spec
        slots, width = cls._slots(spec.num_kv_heads, spec.head_size)
        return replace(spec, num_head_slots=slots, state_content_bytes=width * spec.dtype.itemsize)

    @classmethod
    def _slots(cls, num_kv_heads: int, head_size: int) -> tuple[int, int]:
        """Slots of a token in a page, and elements of each."""
        return (2, num_kv_heads * head_size) if cls.kv_apart else (head_slots(num_kv_heads), head_size)

    # -- layout of KV to 0.28 -----------------------------------------------------------------------------

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The logical page; see `pages`."""
        slots, width = cls._slots(num_kv_heads, head_size)
        return (num_blocks, slots, block_size, width)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Token by token in memory, with layers each page holds all of them; or K of all pages and then V."""
        if cls.kv_apart and include_num_layers_dimension:
            raise NotImplementedError("K apart from V is a layer's own")
        if cls.kv_apart:
            return (1, 0, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """vLLM's name of it."""
        return "NHD"


def kv_scales(layer: Any, kv_cache_dtype: str) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The layer's scales of fp8 KV on the device; None where KV is not fp8."""
    return (layer._k_scale, layer._v_scale) if is_fp8(kv_cache_dtype) else (None, None)
