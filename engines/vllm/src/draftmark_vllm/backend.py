"""The backend class that vLLM's selector reads: names, capabilities and KV layout.

Importing this module raises an error if the installed vLLM is not supported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend

from draftmark import Form
from draftmark_engines import EngineError

from .bound_backends import OTHER_BACKEND, Geometries
from .custom import CustomBackend
from .limits import chosen_backend, engine_limits, layer_shape, profile_of
from .options import refused_option, refused_ragged
from .pages import head_slots
from .registration import CLAIM
from .versions import VLLM

VLLM.require()
CLAIM.check()


class DraftmarkBackend(CustomBackend, AttentionBackend):  # type: ignore[misc]
    """vLLM's backend CUSTOM, served by draftmark. Its forward also writes KV. It refuses unsupported models."""

    forward_includes_kv_cache_update: bool = True
    # True if K and V of a layer lie in two separate halves, for a backend without STRIDED_KV. The methods from which
    # vLLM reads the layout get no configuration. So `supports_combination`, which vLLM calls before them in each
    # process, sets this attribute.
    separate_kv: ClassVar[bool] = False
    # Class for the layer that vLLM has just validated; None for this class.
    _selected: ClassVar[type | None] = None

    def __init_subclass__(cls, **arguments: Any) -> None:
        """Refuse the subclasses that vLLM derives for special kinds of layers, except for chunked attention.

        These subclasses change each step: for bidirectional prefixes, for sinks that are tokens, and for layers that
        read another model's KV. Chunked attention only splits requests into more requests, so it is served.

        Raises:
            EngineError: the subclass belongs to another kind of layer.
        """
        super().__init_subclass__(**arguments)
        kind = cls.__name__.removesuffix(DraftmarkBackend.__name__).strip("_")
        if not kind.startswith("ChunkedLocalAttention"):
            raise EngineError(f"the model has layers of vLLM's kind {kind}, which is not served; {OTHER_BACKEND}")

    @staticmethod
    def get_impl_cls() -> Any:
        """Return `DraftmarkImpl`, the class that runs one attention layer."""
        from .impl import DraftmarkImpl

        return DraftmarkImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """Return `DraftmarkBuilder`, the class that builds the attention metadata of a step."""
        from .builder import DraftmarkBuilder

        return DraftmarkBuilder

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True. Each layer can have its own sliding window, which counts positions."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True. `supports_combination` checks whether the chosen backend serves sinks."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True. `supports_combination` checks whether the chosen backend serves DRAFT_BLOCK."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return True: in adaptive verification the device decides the rows of each verify (RAGGED_VERIFY)."""
        return True

    @classmethod
    def validate_configuration(cls, *given: Any, **arguments: Any) -> list[str]:
        """Return why the backend does not serve a layer; an empty list if it does.

        `DraftmarkMLABackend` answers for MLA layers. One class cannot serve both kinds of layers, but one model can
        have both: an MLA target with a draft head without MLA. vLLM's platform validates a backend's class, and then
        imports the class that `full_cls_name` returns.
        """
        cls._selected = None
        if not arguments.get("use_mla"):
            found: list[str] = super().validate_configuration(*given, **arguments)
            return found
        from .latent.backend import DraftmarkMLABackend

        found = DraftmarkMLABackend.validate_configuration(*given, **arguments)
        cls._selected = None if found else DraftmarkMLABackend
        return found

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Return module and name of this class; right after MLA layers were validated, those of their class."""
        selected, cls._selected = cls._selected or cls, None
        return selected.__module__, selected.__qualname__

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
        """Return why the chosen backend does not serve the model's shape, or None. vLLM prints the reason."""
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
        cls.separate_kv = Form.STRIDED_KV not in made.decode_verify.forms
        return refused_ragged(config, made, backend.info.name)

    # -- KV layout in vLLM 0.29 and later (0.28 calls one method) ----------------------------------------

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:
        """Return the KV layout: axes layer, page, token, head. With separate K and V, K of all pages precedes V."""
        from vllm.v1.kv_cache_layout import KVCacheLayout

        return (KVCacheLayout.LHBNC if cls.separate_kv else KVCacheLayout.LBNHC,)

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return a spec with draftmark's page layout: K heads of a token, then its V heads.

        With separate K and V, one slot holds all K heads and another holds all V heads. See `pages`.

        Raises:
            EngineError: heads of K and V differ in size.
        """
        if spec.head_size != spec.head_size_v:
            raise EngineError(
                f"heads of K have {spec.head_size} elements and heads of V have {spec.head_size_v}; draftmark serves "
                f"equal sizes only; {OTHER_BACKEND}"
            )
        if spec.state_content_bytes is not None:
            return spec
        slots, width = cls._slots(spec.num_kv_heads, spec.head_size)
        return replace(spec, num_head_slots=slots, state_content_bytes=width * spec.dtype.itemsize)

    @classmethod
    def _slots(cls, num_kv_heads: int, head_size: int) -> tuple[int, int]:
        """Return (head slots per token, elements per slot). With separate K and V a slot has all heads of K or of V."""
        return (2, num_kv_heads * head_size) if cls.separate_kv else (head_slots(num_kv_heads), head_size)

    # -- KV layout up to vLLM 0.28 ------------------------------------------------------------------------

    @classmethod
    def get_kv_cache_shape(
        cls, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the logical shape of a layer's KV memory. The module `pages` describes its layout."""
        slots, width = cls._slots(num_kv_heads, head_size)
        return (num_blocks, slots, block_size, width)

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Return the order of the axes in memory: page, token, head. With separate K and V, K of all pages comes first.

        With a dimension for layers, each page holds every layer.

        Raises:
            NotImplementedError: a dimension for layers, but separate K and V.
        """
        if cls.separate_kv and include_num_layers_dimension:
            raise NotImplementedError("separate K and V have no layout with a dimension for layers")
        if cls.separate_kv:
            return (1, 0, 2, 3)
        return (1, 0, 3, 2, 4) if include_num_layers_dimension else (0, 2, 1, 3)

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Return vLLM's name of the KV layout."""
        return "NHD"
