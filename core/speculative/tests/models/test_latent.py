"""Models with latent attention: the absorbed forward equals transformers' own, and a model that differs is rejected."""

from __future__ import annotations

import copy
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from draftmark import BackendRefusal
from draftmark.errors import ModelError
from draftmark.loaded import LoadedBackend
from draftmark_speculative import Engine, EngineConfig, Ngram, generate
from draftmark_speculative.compare import compare
from draftmark_speculative.models import wrap_model
from draftmark_speculative.models.attention import LATENT
from draftmark_speculative.models.latent import Absorbed
from draftmark_speculative.models.routing import Routing
from draftmark_speculative.models.tiny import tiny_hf_model, tiny_model

LATENTS = ("deepseek_v3", "glm4_moe_lite", "minicpm3")
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "fields", "row"),
    [
        ("deepseek_v3", {}, (4, 40, 32, 20**-0.5 * (1 + 0.1 * 1.3862944) ** 2)),
        ("deepseek_v3", {**PLAIN_ROPE, "q_lora_rank": None, "rope_interleave": False}, (4, 40, 32, 20**-0.5)),
        ("deepseek_v3", {"num_attention_heads": 3, "num_key_value_heads": 3, "v_head_dim": 6, "kv_lora_rank": 24},
         (3, 32, 24, 20**-0.5 * (1 + 0.1 * 1.3862944) ** 2)),
        ("deepseek_v3", {"rope_parameters": YARN}, (4, 40, 32, 20**-0.5)),
        ("deepseek_v2", {"topk_method": "greedy"}, (4, 40, 32, 20**-0.5)),
        ("glm4_moe_lite", {}, (20, 40, 32, 20**-0.5)),
        ("minicpm3", {}, (6, 28, 24, 12**-0.5)),
        ("youtu", {}, (4, 40, 32, 20**-0.5)),
        ("axk1", {}, (4, 40, 32, 20**-0.5)),
    ],
    ids=str,
)  # fmt: skip
def test_absorbed_forward_is_accepted(monkeypatch: Any, family: str, fields: dict[str, Any], row: Any) -> None:
    """Any widths, with and without q_lora, with either rotary convention, give transformers' own logits."""
    model = tiny_of(monkeypatch, family, **fields)
    heads, head_dim, value_dim, scale = row
    one = model.layers[0]
    assert (one.num_qo_heads, one.num_kv_heads, one.head_dim, one.value_dim) == (heads, 1, head_dim, value_dim)
    assert one.softmax_scale == pytest.approx(scale)
    assert one.latent and len(set(model.layers)) == 1


def tiny_of(monkeypatch: Any, family: str, **fields: Any) -> Any:
    """Return a tiny model of any latent family, in the shape of the tiny DeepSeek V3 where it has none of its own."""
    from draftmark_speculative.models import tiny

    shape = {key: value for key, value in tiny.FAMILIES["deepseek_v3"].items() if key != "rope_parameters"}
    monkeypatch.setitem(tiny.FAMILIES, family, tiny.FAMILIES.get(family, shape))
    return tiny_model(family, **fields)


SMALL = {
    **{"vocab_size": 256, "hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "max_position_embeddings": 256, "initializer_range": 0.3, "bos_token_id": None},
    **{"eos_token_id": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10},
    **{"q_lora_rank": 24, "n_routed_experts": 8},
}
LONGCAT = {
    **{"num_layers": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 24, "moe_topk": 2, "zero_expert_num": 2},
    "head_dim": 8,
}
LLAMA_4 = {**YARN, "partial_rotary_factor": 0.4, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}
MISTRAL_4 = {
    **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_hidden_layers": 3},
    **{"head_dim": 20, "rope_parameters": LLAMA_4},
}


@pytest.mark.parametrize(
    ("name", "fields"), [("LongcatFlash", LONGCAT), ("Mistral4", MISTRAL_4)], ids=["longcat", "mistral4"]
)
def test_families_with_factors_of_their_own_give_the_plain_text(name: str, fields: dict[str, Any]) -> None:
    """Factors on the queries or on the latent (LongCat), and on queries by position (Mistral 4), are applied."""
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**SMALL, **fields)
        hf = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6] * 5])
    want = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0)
    config = EngineConfig(speculate=Ngram(2, 6, 3, 1), page_size=48, max_context_len=64)
    outputs, _ = generate(wrap_model(hf), ids.tolist(), 20, config)
    assert list(outputs[0].tokens) == want[0, 40:].tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("family", LATENTS)
def test_half_precision_is_accepted_with_any_weights(family: str, dtype: str) -> None:
    """Twelve random models are accepted in half precision, although rounding selects other experts in some of them."""
    for seed in range(12):
        assert tiny_model(family, seed, dtype=dtype).layers[0].latent


def test_other_experts_by_rounding_would_be_rejected(monkeypatch: Any) -> None:
    """Without repeated expert choices, a bfloat16 model is rejected: the test above needs them."""
    monkeypatch.setattr(Routing, "__bool__", lambda self: False)
    with pytest.raises(ModelError, match="differ from transformers' own"):
        for seed in range(12):
            tiny_model("deepseek_v3", seed, dtype="bfloat16")


def test_bfloat16_text_is_right_up_to_rounding(prompts: Any) -> None:
    """Rounding explains every token of a bfloat16 text of a dense latent model."""
    model = tiny_model("minicpm3", dtype="bfloat16")
    starts, config = prompts(2, 12), EngineConfig(max_context_len=32)
    outputs, _ = generate(model, starts, 12, config)
    assert compare(model, starts, [one.tokens for one in outputs], {}, config).right


# -- models and mistakes that are rejected ------------------------------------------------------------------


def unrotated(self: Absorbed, query: torch.Tensor) -> torch.Tensor:
    """Mutant of `queries`: the rotated part is missing."""
    absorbed = QUERIES(self, query)
    absorbed[..., self.value_dim :] = 0
    return absorbed


def other_heads(self: Absorbed, query: torch.Tensor) -> torch.Tensor:
    """Mutant of `queries`: each head gets the keys of the next one."""
    return QUERIES(self, query.roll(1, dims=1)).roll(-1, dims=1)


def keys_for_values(self: Absorbed, out: torch.Tensor) -> torch.Tensor:
    """Mutant of `values`: values are read where the keys of a head begin."""
    up = self._weight()[:, : self._module.v_head_dim]
    return torch.bmm(out.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)


def unnormalized(self: Absorbed, latent: torch.Tensor, rotated: torch.Tensor) -> Any:
    """Mutant of `expand_kv`: draftmark's row has half the latent."""
    key, value = EXPAND(self, latent, rotated)
    if key.shape[1] == 1:
        key = torch.cat((latent / 2, rotated), -1)
    return key, value


QUERIES, EXPAND = Absorbed.queries, Absorbed.expand_kv
MUTANTS = {"queries": (unrotated, other_heads), "values": (keys_for_values,), "expand_kv": (unnormalized,)}


@pytest.mark.parametrize(
    ("name", "mutant"),
    [(name, one) for name, every in MUTANTS.items() for one in every],
    ids=lambda one: getattr(one, "__name__", one),
)
@pytest.mark.parametrize("family", LATENTS)
def test_a_mistake_in_the_absorption_is_found(monkeypatch: Any, family: str, name: str, mutant: Any) -> None:
    """A wrong absorbed forward raises one sentence at load."""
    hf = tiny_hf_model(family)
    monkeypatch.setattr(Absorbed, name, mutant)
    _refused(hf, "differ from transformers' own", family)
    monkeypatch.undo()
    wrap_model(hf)


def test_a_change_of_the_projected_keys_is_found() -> None:
    """A family that changes keys or values after kv_b_proj differs from its absorbed form, and is rejected."""
    hf = tiny_hf_model("deepseek_v3")
    hf.model.layers[1].self_attn.kv_b_proj.register_forward_hook(lambda _m, _i, out: out * 1.5)
    _refused(hf, "differ from transformers' own", "deepseek_v3")


def test_a_factor_that_the_configuration_does_not_state_is_found() -> None:
    """A softmax scale that differs from the configuration's raises an error with both values."""
    hf = tiny_hf_model("deepseek_v3")
    hf.model.layers[2].self_attn.scaling *= 1.1
    _refused(hf, "softmax_scale .* for layer 2, but the layer calls attention with", "deepseek_v3")


def test_projection_that_is_not_a_plain_matrix_is_rejected() -> None:
    """kv_b_proj with a bias raises an error with the module and its expected shape."""
    hf = tiny_hf_model("deepseek_v3")
    hf.model.layers[0].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.zeros(112))
    _refused(hf, r"model.layers.0.self_attn.kv_b_proj is not a plain 112 x 32 matrix", "deepseek_v3")


def test_attention_without_expand_kv_is_rejected(monkeypatch: Any) -> None:
    """Attention that expands the latent elsewhere is rejected, with the method that is missing."""
    hf = tiny_hf_model("deepseek_v3")
    monkeypatch.delattr(type(hf.model.layers[0].self_attn), "expand_kv")
    _refused(hf, "self_attn has a latent, but no expand_kv", "deepseek_v3")


def _refused(hf: Any, named: str, family: str) -> None:
    with pytest.raises(ModelError, match=named) as refused:
        wrap_model(hf, name="some-model")
    message = str(refused.value)
    assert message.startswith(f"model 'some-model' (family {family}) cannot be decoded: "), message
    assert "; use " in message and "\n" not in message
    assert not any(hasattr(module, LATENT) or "expand_kv" in vars(module) for module in hf.modules())


def test_backend_without_latent_is_refused_by_name(make_model: Any, monkeypatch: Any) -> None:
    """A backend that does not declare latent layers is refused in one sentence, before any token."""
    real = LoadedBackend.__init__

    def without(self: Any, name: str, plugin: Any) -> None:
        real(self, name, plugin)
        self.info = replace(self.info, latent=False)

    monkeypatch.setattr(LoadedBackend, "__init__", without)
    with pytest.raises(BackendRefusal, match=r"latent attention is not served") as refusal:
        Engine(make_model("deepseek_v3"), EngineConfig(max_context_len=32))
    assert "\n" not in str(refusal.value)
    Engine(make_model("llama"), EngineConfig(max_context_len=32))


# -- the wrapped model ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", LATENTS)
def test_wrapped_model_keeps_its_own_forward(family: str) -> None:
    """The transformers model, and a copy of it, give the same logits before and after it is wrapped."""
    hf, ids = tiny_hf_model(family), torch.arange(12)[None]
    with torch.no_grad():
        before = hf(ids).logits
        wrap_model(hf)
        assert torch.equal(hf(ids).logits, before)
        copied = copy.deepcopy(hf)
        copied.model.layers[0].self_attn.kv_b_proj.weight.mul_(2)
        assert not torch.equal(copied(ids).logits, before)
        assert torch.equal(hf(ids).logits, before)


def test_pool_stores_one_row_a_token(make_model: Any) -> None:
    """The cache of a latent layer has one buffer of rows, and its values are a view of them."""
    layers = Engine(make_model("glm4_moe_lite"), EngineConfig(max_context_len=32))._layers
    for cache in layers._caches:
        assert cache.k.shape[-2:] == (1, 40) and cache.v.shape[-2:] == (1, 32)
        assert cache.v.data_ptr() == cache.k.data_ptr()
    assert int(layers.geometry.row_bytes) == 40 * 4


@pytest.mark.parametrize(("family", "page_size"), list(product(LATENTS, [1, 48])))
def test_loaded_folder_decodes(tmp_path: Any, family: str, page_size: int, prompts: Any) -> None:
    """A latent model that was saved as safetensors loads and gives the texts of the model in memory."""
    from draftmark_speculative.models import load_model

    model = tiny_model(family)
    model.hf.save_pretrained(tmp_path)
    config, starts = EngineConfig(max_context_len=48, page_size=page_size), prompts(2, 20)
    want, _ = generate(model, starts, 8, config)
    assert generate(load_model(tmp_path), starts, 8, config)[0] == want
