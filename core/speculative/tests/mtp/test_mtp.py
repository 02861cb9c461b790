"""Drafts of an MTP layer: equal to transformers' own un-absorbed layer, read from DeepSeek V3's tensors, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.speculative.tests.dense import compare
from core.speculative.tests.mtp_files import write_mtp
from draftmark import GeometryError, ModelError
from draftmark_speculative import EngineConfig, HostKind, Mtp, generate
from draftmark_speculative.models import load_model
from draftmark_speculative.models.attention import LATENT
from draftmark_speculative.models.latent import Absorbed
from draftmark_speculative.models.tiny import tiny_model
from draftmark_speculative.mtp import MtpHead
from draftmark_speculative.mtp.tiny import tiny_mtp, tiny_mtp_pair

LATE = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND, "graph": True}


class Unabsorbed:
    """`MtpHead` with transformers' own attention over all rows."""

    def __init__(self, head: MtpHead) -> None:
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, embeddings: Any, fused: Any, positions: Any, attend: Any) -> Any:
        return self._head.module.forward_layer(0, fused[None], positions[None], None, inputs_embeds=embeddings[None])[0]


@pytest.mark.parametrize(
    ("family", "shape", "page_size", "late"),
    [
        ("deepseek_v3", (1, 4, 5), 48, False),
        ("deepseek_v3", (4, 3, 12), 1, True),
        ("glm4_moe_lite", (2, 3, 9), 16, True),
        pytest.param("minicpm3", (3, 3, 10), 64, False, marks=pytest.mark.slow),
        ("llama", (3, 3, 10), 4, True),
    ],
)
@torch.no_grad()
def test_engine_drafts_the_trees_of_the_layer(prompts, family, shape, page_size, late):
    """With random weights, every tree equals the tree of transformers' own layer, run over each path without a cache.

    A mistake in the layer's rows, latent cache, masks, inputs or positions changes the tokens.
    """
    model = tiny_model(family)
    head, more = tiny_mtp(model), LATE if late else {}
    starts = prompts(3, 16)
    wrong, trees, _ = compare(model, head, starts, shape, Mtp, Unabsorbed(head), page_size=page_size, **more)
    assert (wrong, trees > 20) == (0, True)


@torch.no_grad()
def test_trees_are_right_after_accepted_paths(prompts):
    """After accepted paths of several tokens, the trees still equal those of transformers' own layer."""
    model, head = tiny_mtp_pair("deepseek_v3")
    wrong, trees, accepted = compare(model, head, prompts(3, 12), (2, 3, 8), Mtp, Unabsorbed(head), **LATE)
    assert (wrong, trees > 10) == (0, True)
    assert accepted > 1.3, "the test needs accepted drafts"


@torch.no_grad()
def test_a_wrong_latent_row_changes_the_trees_but_not_the_text(monkeypatch, prompts):
    """A drafter that reads half of its latent rows drafts other trees, and the text stays the model's."""
    model = tiny_model("deepseek_v3")
    head, starts = tiny_mtp(model), prompts(3, 16)
    want, _ = generate(model, starts, 12, EngineConfig(max_context_len=64))
    absorbed = getattr(head.module.layers[0].mtp_block.self_attn, LATENT)
    monkeypatch.setattr(absorbed, "queries", lambda query: Absorbed.queries(absorbed, query) * 0.5)
    wrong, trees, _ = compare(model, head, starts[:2], (2, 3, 9), Mtp, Unabsorbed(head))
    assert wrong > trees / 4
    config = EngineConfig(max_context_len=64, speculate=Mtp(head, 2, 3, 9))
    assert generate(model, starts, 12, config)[0] == want


def test_a_layer_leaves_its_target_unchanged():
    """A new MTP layer shares the target's embedding and output layer, and changes neither."""
    model, ids = tiny_model("deepseek_v3"), torch.arange(9)[None]
    with torch.no_grad():
        before = model.hf(ids).logits
        head = tiny_mtp(model)
        assert torch.equal(model.hf(ids).logits, before)
    assert head.module.embed_tokens is model.hf.get_input_embeddings()


# -- files ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["deepseek_v3", "glm4_moe_lite"])
def saved(request, tmp_path):
    """A model folder with an MTP layer in DeepSeek V3's names, and the model and layer that were saved."""
    model, head = tiny_mtp_pair(request.param, num_nextn_predict_layers=1)
    model.hf.save_pretrained(tmp_path)
    write_mtp(tmp_path, model, head)
    return tmp_path, model, head


def test_layer_is_read_from_deepseeks_tensors(saved, prompts):
    """`Mtp()` reads ``model.layers.N`` of the model's folder, and drafts as the layer that was saved."""
    folder, model, head = saved
    loaded = load_model(folder)
    read = Mtp().open(loaded)
    for name, tensor in head.module.layers.state_dict().items():
        assert torch.equal(read.module.layers.state_dict()[name], tensor), name
    config, starts = {"max_context_len": 48, "page_size": 48}, prompts(3, 20)
    want, mine = generate(model, starts, 12, EngineConfig(speculate=Mtp(head), **config))
    got, theirs = generate(loaded, starts, 12, EngineConfig(speculate=Mtp(), **config))
    assert got == want
    assert theirs.statistics.mean_accepted == mine.statistics.mean_accepted > 1.1


def test_folder_without_a_layer_is_refused(tmp_path):
    """A folder without tensors of layer N raises an error that names the layer."""
    tiny_model("deepseek_v3").hf.save_pretrained(tmp_path)
    _refused(load_model(tmp_path), r"its folder has no MTP layer \(no tensor of layers.3\)")


def test_incomplete_layer_is_refused(saved):
    """A layer that lacks a tensor raises an error with the tensor's name."""
    folder, model, _ = saved
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"model.layers.{model.hf.config.num_hidden_layers}.hnorm.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    _refused(load_model(folder), r"its MTP layer cannot be read \(RuntimeError: .*hnorm")


def test_model_in_memory_is_refused():
    """A model that was not loaded from a folder needs an MtpHead."""
    _refused(tiny_model("deepseek_v3"), "it was not loaded from a folder")


def test_layer_that_differs_from_transformers_is_refused():
    """An absorbed layer that differs from transformers' own raises one sentence."""
    model = tiny_model("deepseek_v3")
    head = tiny_mtp(model)
    attention = head.module.layers[0].mtp_block.self_attn
    attention.kv_b_proj.register_forward_hook(lambda _m, _i, out: out * 1.5)
    with pytest.raises(ModelError, match="its MTP layer differs from transformers' own by") as refused:
        MtpHead(head.module, model)
    assert "\n" not in str(refused.value)


def _refused(model, named):
    with pytest.raises(ModelError, match=named) as refused:
        Mtp().open(model)
    assert "\n" not in str(refused.value) and "; " in str(refused.value)


def test_wrong_arguments_are_refused():
    """A wrong head and a topk beyond the vocabulary raise errors with the value."""
    from draftmark import RequestError

    with pytest.raises(RequestError, match="head is 'layer', but it must be an MtpHead"):
        Mtp("layer")
    with pytest.raises(GeometryError, match=r"draft.topk is 300, but the layer can draft 256 tokens"):
        Mtp(topk=300).open(tiny_model("deepseek_v3"))
