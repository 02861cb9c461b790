"""Draft heads: files, configuration, and the interface for training."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from draftmark.errors import GeometryError, ModelError
from draftmark_speculative import DraftHead, Eagle, Engine, EngineConfig, HostKind, Ngram
from draftmark_speculative.eagle import HeadConfig, dense_attention
from draftmark_speculative.eagle.installed import installed_head


@pytest.mark.parametrize(("features", "vocab"), [((2,), None), ((0, 1, 2), None), ((1, 2), 40)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_head_loads_unchanged(random_head, tmp_path, features, vocab, dtype):
    """A loaded head has the configuration, weights and draft vocabulary of the saved head, in any dtype."""
    head = deepcopy(random_head(features, 1, vocab)).to(dtype)
    head.save(tmp_path / "head")
    again = DraftHead.load(tmp_path / "head", dtype=torch.float32)
    assert again.config == head.config
    for name, tensor in head.float().state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not any(parameter.requires_grad for parameter in again.parameters())


@torch.no_grad()
def test_packed_head_computes_the_same_output(random_head):
    """Packing a head does not change its output or its saved weights."""
    head = deepcopy(random_head((0, 2)))
    embeddings, features = torch.randn(5, 48), torch.randn(5, 96)
    arguments = embeddings, head.fuse(features), torch.arange(5), dense_attention
    before, weights = head(*arguments), {name: tensor.clone() for name, tensor in head.state_dict().items()}
    torch.testing.assert_close(head.pack()(*arguments), before)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in head.state_dict().items())


@torch.no_grad()
def test_batched_sequences_do_not_mix(random_head):
    """Dense attention is causal and keeps the sequences of a batch apart; positions may be shared or per sequence."""
    head = random_head()
    e, f, positions = torch.randn(3, 7, 48), torch.randn(3, 7, 144), torch.arange(7)
    all_rows = head(e, head.fuse(f), positions, dense_attention)
    for row in range(3):
        single = head(e[row, :4], head.fuse(f[row, :4]), positions[:4], dense_attention)
        torch.testing.assert_close(all_rows[row, :4], single, atol=1e-4, rtol=1e-4)
    by_row = head(e, head.fuse(f), positions.expand(3, -1), dense_attention)
    torch.testing.assert_close(all_rows, by_row)


@torch.no_grad()
def test_only_relative_positions_matter(random_head):
    """Shifting all positions equally does not change the head's output; shifting one position does."""
    head = random_head()
    e, g = torch.randn(5, 48), torch.randn(5, 48)
    here = head(e, g, torch.arange(5), dense_attention)
    torch.testing.assert_close(head(e, g, torch.arange(5) + 100, dense_attention), here, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(head(e, g, torch.tensor([0, 1, 2, 3, 9]), dense_attention)[-1], here[-1], atol=1e-3)


def test_gradients_reach_every_weight(random_head):
    """Gradients reach every weight when the head's own output is fed back."""
    head = deepcopy(random_head()).requires_grad_(True).train()
    e, f = torch.randn(2, 6, 48), torch.randn(2, 6, 144)
    g = head(e, head.fuse(f), torch.arange(6), dense_attention)
    g = head(e, g, torch.arange(6) + 1, dense_attention)
    head.logits(g, torch.randn(256, 48)).sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in head.parameters())


@torch.no_grad()
def test_a_reduced_vocabulary_scores_the_same_tokens(random_head):
    """Draft token i scores target token d2t[i], with output rows gathered before or inside the call."""
    head, weight, hidden = random_head(draft_vocab=40), torch.randn(256, 48), torch.randn(5, 48)
    logits = head.logits(hidden, weight)
    assert logits.shape == (5, 40)
    assert torch.equal(logits, head.logits(hidden, head.output_rows(weight)))
    whole = random_head()
    full = torch.nn.functional.linear(head.output_norm(hidden), weight)
    torch.testing.assert_close(logits, full[:, head.target_tokens(torch.arange(40))])
    assert torch.equal(whole.target_tokens(torch.arange(5)), torch.arange(5))


GOOD = HeadConfig(48, 256, 4, 2, 12, 96, (1, 2))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"head_dim": 13}, "head_dim is 13"),
        ({"num_attention_heads": 3}, "3 query heads for 2 KV heads"),
        ({"feature_layers": ()}, "feature_layers are \\[\\]"),
        ({"feature_layers": (2, 1)}, "feature_layers are \\[2, 1\\]"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
    ],
)
def test_invalid_head_shape_is_rejected(change, named):
    """An invalid field of a head's configuration raises an error that names the field."""
    with pytest.raises(ModelError, match=named):
        replace(GOOD, **change)


def test_damaged_files_are_refused(random_head, tmp_path):
    """Damaged or missing files of a head each raise a one-sentence error about the damage."""
    folder = tmp_path / "head"
    with pytest.raises(ModelError, match=r"no head\.json"):
        DraftHead.load(folder)
    random_head((1, 2)).save(folder)
    text = (folder / "head.json").read_text()
    for damage, named in [
        (text[:-9], "is not JSON"),
        (text.replace("head/1", "head/9"), "does not have format"),
        (text.replace('"rope_theta"', '"rope"'), "unknown fields rope"),
        (text.replace('"intermediate_size": 96', '"intermediate_size": 95'), "does not fit its head.json"),
    ]:
        (folder / "head.json").write_text(damage)
        with pytest.raises(ModelError, match=named):
            DraftHead.load(folder)
    (folder / "head.json").write_text(text)
    (folder / "head.safetensors").write_bytes(b"123")
    with pytest.raises(ModelError, match="cannot be read"):
        DraftHead.load(folder)
    assert json.loads(text)["feature_layers"] == [1, 2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 32}, "hidden_size is 32, but model 'tiny-llama' has 48"),
        ({"vocab_size": 255}, "vocab_size is 255, but model 'tiny-llama' has 256"),
        ({"feature_layers": (1, 3)}, "model 'tiny-llama' has no hidden state 3, only 0 … 2"),
    ],
)
def test_a_head_for_another_model_is_refused(make_model, change, named):
    """A head for another model is rejected when the engine is made."""
    head = DraftHead(replace(GOOD, **change))
    with pytest.raises(ModelError, match=named):
        Engine(make_model("llama"), EngineConfig(speculate=Eagle(head), max_context_len=64))


def test_engine_does_not_change_the_callers_head(make_model):
    """The engine copies the head, so the caller's head keeps its gradients and training mode."""
    head = DraftHead(GOOD).train()
    Engine(make_model("llama"), EngineConfig(speculate=Eagle(head), max_context_len=64))
    assert head.training
    assert all(parameter.requires_grad for parameter in head.parameters())


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"speculate": Eagle(DraftHead(GOOD), topk=300)}, "draft.topk is 300, but the head can draft 256 tokens"),
        ({"speculate": Eagle(DraftHead(GOOD), num_steps=0)}, "draft.num_steps is 0"),
        ({"host_lengths": "bogus"}, "host_lengths is 'bogus'"),
        ({"overlap": True, "host_lengths": "exact"}, "overlap is on with host_lengths exact"),
        ({"overlap": True}, "overlap is on with host_lengths exact"),
        ({"overlap": True, "host_lengths": HostKind.UNKNOWN, "speculate": Ngram()}, "drafts of Ngram"),
    ],
)
def test_invalid_engine_settings_are_rejected(make_model, settings, named):
    """Invalid engine settings raise an error that names the setting."""
    with pytest.raises((GeometryError, ValueError), match=named):
        Engine(make_model("llama"), EngineConfig(max_context_len=64, **settings))


def test_no_installed_head_is_one_sentence():
    """A model without an installed head gives an error that names the model."""
    with pytest.raises(ModelError, match="no draft head is installed for model 'nosuch'"):
        installed_head("nosuch")
