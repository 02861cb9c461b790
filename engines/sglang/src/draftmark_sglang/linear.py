"""SGLang's two backends of a hybrid model, with draftmark for attention layers and for recurrent layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend, Mamba2AttnBackend

from draftmark_engines import EngineError

from .backend import DraftmarkBackend
from .state_inputs import mamba2_inputs
from .state_kernels import gated_delta_inputs
from .state_memory import active_states
from .state_shapes import ARCHITECTURES, Family
from .versions import SUPPORTED

logger = logging.getLogger(__package__)


class LinearBackend(Mamba2AttnBackend):  # type: ignore[misc]  # sglang has no types here
    """Recurrent layers as SGLang's models call them. `DraftmarkBackend` prepares both kinds of layers together.

    Models with Mamba2 layers require an instance of `Mamba2AttnBackend`. Nothing of that class is used.
    """

    needs_cpu_seq_lens = False

    def __init__(self, attention: DraftmarkBackend) -> None:
        AttentionBackend.__init__(self)
        assert attention.states is not None, "the model has recurrent layers"
        self._states = attention.states
        # Before 0.5.22 SGLang's Kimi model applies the sigmoid to the write strength of prompts itself.
        self._raw_prompts = not SUPPORTED.installed_before("0.5.22")
        self.req_to_token_pool, self.token_to_kv_pool = attention.req_to_token_pool, attention.token_to_kv_pool

    @property
    def forward_metadata(self) -> Any:
        """Row counts that Nemotron-H reads in a prefill that runs in pieces of CUDA graphs."""
        return SimpleNamespace(num_prefill_tokens=self._states.num_rows, num_decodes=0, is_target_verify=False)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Do nothing; `DraftmarkBackend` prepares the batch."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Do nothing; `DraftmarkBackend` prepares the batch."""

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Do nothing; `DraftmarkBackend` prepares the batch."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Do nothing; `DraftmarkBackend` allocates the buffers of both kinds of layers."""

    def forward_extend(
        self, layer: Any, forward_batch: Any, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        """Run a Gated DeltaNet or KDA layer in any mode.

        Args:
            layer: SGLang's `RadixLinearAttention`.
            mixed_qkv: ``[rows, channels]`` before the convolution.
            a, b: projections of decay and write strength.

        Returns:
            ``[1, rows, num_v_heads, head_v_dim]``.
        """
        rows, raw_beta = len(mixed_qkv), True
        if self._states.served.family is Family.KDA:
            a = a.reshape(rows, layer.num_v_heads, layer.head_k_dim)
            mode = forward_batch.forward_mode
            raw_beta = self._raw_prompts or mode.is_decode() or mode.is_target_verify()
        inputs = partial(gated_delta_inputs, layer, raw_beta=raw_beta)
        gates = a, b.reshape(rows, layer.num_v_heads)
        return self._states.run(layer.layer_id, mixed_qkv, layer.conv_weights, layer.bias, gates, inputs)[None]

    forward_decode = forward_extend

    def forward(
        self,
        mixer: Any,
        hidden_states: torch.Tensor,
        output: torch.Tensor | None,
        layer_id: int,
        forward_batch: Any,
        mup_vector: torch.Tensor | None = None,
        use_triton_causal_conv: bool = False,
    ) -> torch.Tensor:
        """Run a Mamba2 layer in any mode: projections, convolution, recurrence, gated norm.

        Args:
            mixer: SGLang's `MambaMixer2`.
            hidden_states: ``[rows, hidden_size]``.
            output: ``[rows, hidden_size]`` that gets the result too; None for no copy.
            mup_vector: factors of the projections, or None.
            use_triton_causal_conv: ignored.

        Returns:
            ``[rows, hidden_size]``.
        """
        projected, _ = mixer.in_proj(hidden_states)
        if mup_vector is not None:
            projected = projected * mup_vector
        ranks = mixer.tp_size
        sizes = mixer.intermediate_size // ranks, mixer.conv_dim // ranks, mixer.num_heads // ranks
        gate, channels, dt = projected.split(sizes, -1)
        weight = mixer.conv1d.weight.flatten(1)
        inputs = partial(mamba2_inputs, mixer)
        found = self._states.run(layer_id, channels, weight, mixer.conv1d.bias, (dt,), inputs)
        mixed, _ = mixer.out_proj(mixer.norm(found.flatten(1), gate))
        if output is not None:
            output[: len(mixed)].copy_(mixed)
        return mixed  # type: ignore[no-any-return]


class HybridBackend(HybridLinearAttnBackend):  # type: ignore[misc]
    """SGLang's backend of a hybrid model. draftmark's commit ends a verification."""

    def update_mamba_state_after_mtp_verify(self, *arguments: Any, **named: Any) -> None:
        """Raise an error: the hook `commit_states` commits the states, so SGLang must not call this method."""
        raise NotImplementedError(
            "SGLang commits recurrent states by leaf, which --attention-backend draftmark does not support; use a "
            "speculative algorithm that ends a round in commit_mamba_states_after_verify: EAGLE, EAGLE3 or NGRAM"
        )


def hybrid_backend(original: Callable[[Any, Any], Any], runner: Any, attention: Any) -> Any:
    """Wrap an attention backend for a hybrid model; SGLang's own wrapper does it where draftmark runs no states.

    Raises:
        EngineError: a draft model has recurrent layers.
    """
    if not isinstance(attention, DraftmarkBackend):
        return original(runner, attention)
    from sglang.srt.configs.hybrid_arch import mambaish_config

    if attention.states is not None:
        logger.info("recurrent layers run on draftmark's backend %s", attention.states.served.loaded.name)
        layers = mambaish_config(runner.model_config).full_attention_layer_ids
        return HybridBackend(attention, LinearBackend(attention), layers)
    if not runner.is_draft_worker or active_states() is None:
        if not runner.is_draft_worker and mambaish_config(runner.model_config) is not None:
            logger.info("recurrent layers run on SGLang's own backend")
        return original(runner, attention)
    architecture = runner.model_config.hf_config.architectures[0]
    if architecture in ARCHITECTURES:
        raise EngineError(
            f"draft model {architecture} has recurrent layers, whose states of rejected drafts are not taken back; use "
            "its MTP layer (--speculative-algorithm EAGLE without a draft model), or NGRAM"
        )
    # The configuration of an MTP layer is its target's, with recurrent layers, but the layer has attention.
    return attention
