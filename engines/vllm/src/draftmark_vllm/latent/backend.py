"""The backend class for MLA layers that vLLM's selector reads: names and capabilities."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

from draftmark_engines import EngineError

from ..bound_backends import OTHER_BACKEND, Geometries
from ..custom import CustomBackend
from ..limits import chosen_backend, is_fp8, latent_limits, model_latent_shape, profile_of
from ..options import refused_option, refused_ragged


class DraftmarkMLABackend(CustomBackend, MLACommonBackend):  # type: ignore[misc]
    """vLLM's backend CUSTOM for MLA layers. It refuses unsupported models.

    The base class gives the row widths (320, 512 and 576 elements), because vLLM's metadata refuses all others.

    Attributes:
        supported_kv_cache_dtypes: KV dtypes that pass vLLM's own check. They include fp8_ds_mla (rows of 656 bytes), so
            that `supports_combination` can refuse it in a sentence with a remedy.
    """

    supported_kv_cache_dtypes: ClassVar[list[Any]] = [*CustomBackend.supported_kv_cache_dtypes, "fp8_ds_mla"]

    @staticmethod
    def get_impl_cls() -> Any:
        """Return `DraftmarkMLAImpl`, the class that runs one MLA layer."""
        from .impl import DraftmarkMLAImpl

        return DraftmarkMLAImpl

    @staticmethod
    def get_builder_cls() -> Any:
        """Return `DraftmarkMLABuilder`, the class that builds the attention metadata of a step."""
        from .builder import DraftmarkMLABuilder

        return DraftmarkMLABuilder

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: Any,
        block_size: int | None,
        *rest: Any,
        **more: Any,
    ) -> str | None:
        """Return why the chosen backend does not serve the model's MLA layers, or None. vLLM prints the reason."""
        from vllm.config import get_current_vllm_config
        from vllm.platforms import current_platform

        config = get_current_vllm_config()
        refused = refused_option(config) or _refused_for_latent(config, kv_cache_dtype)
        if refused is not None:
            return refused
        try:
            shape = model_latent_shape(config, head_size, block_size, dtype, kv_cache_dtype)
            backend = chosen_backend(config, current_platform.device_type)
            made = Geometries.of(backend, shape, latent_limits(config), profile_of(current_platform.device_type))
        except EngineError as error:
            return str(error)
        return refused_ragged(config, made, backend.info.name)


def _refused_for_latent(config: Any, kv_cache_dtype: Any) -> str | None:
    """Return a sentence about the first option that only MLA layers do not serve; None if there is none."""
    if is_fp8(kv_cache_dtype) or kv_cache_dtype == "fp8_ds_mla":
        name = "fp8" if is_fp8(kv_cache_dtype) else kv_cache_dtype
        return f"{name} KV of MLA layers is not served; leave --kv-cache-dtype out, or {OTHER_BACKEND}"
    return None
