"""Drafts of several MTP modules: equal to transformers' own layers over the whole text, and never change the text."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from core.speculative.tests.dense import watch
from core.speculative.tests.mtp_files import write_mtp
from draftmark import ModelError, RequestError
from draftmark_speculative import Engine, EngineConfig, HostKind, MtpModules, decode, generate
from draftmark_speculative.models import load_model
from draftmark_speculative.models.tiny import tiny_model
from draftmark_speculative.mtp import modules
from draftmark_speculative.mtp.tiny import tiny_mtp, tiny_mtp_pair
from draftmark_testing.pairs import quick

COUNT = 16
SMALL = {"page_size": 4, "max_num_reqs": 3, "max_context_len": 96, "guard": True}
LATE = {"overlap": True, "host_lengths": HostKind.UPPER_BOUND, "graph": True, "capture_batch_sizes": (1, 3)}
FAMILIES = ("deepseek_v3", "glm4_moe_lite", "llama")
MEMORY = {"enough": {}, "few pages": {"num_pages": 30}, "cache": {"prefix_cache": True, "num_pages": 40}}


@cache
def pair(family: str, count: int):
    """Return a tiny model and its MTP layers. Their drafts are often right."""
    return tiny_mtp_pair(family, num_modules=count)


SETTINGS = product(FAMILIES, [2, 3], [7, 20], [False, True], [False, True], list(HostKind), MEMORY)


@pytest.mark.parametrize(
    ("family", "count", "chunk", "graph", "overlap", "host", "memory"),
    quick(one for one in SETTINGS if not (one[4] and one[5] is HostKind.EXACT)),
)
def test_every_setting_gives_the_plain_text(prompts, family, count, chunk, graph, overlap, host, memory):
    """Two and three modules give the text of plain decoding, for latent layers and for layers with K and V."""
    model, head = pair(family, count)
    starts = prompts(5, 24, seed=count)
    want, _ = generate(model, starts, COUNT, EngineConfig(max_context_len=96))
    config = EngineConfig(
        **SMALL, **MEMORY[memory], max_extend_tokens=chunk, speculate=MtpModules(head, count), overlap=overlap,
        graph=graph, capture_batch_sizes=(1, 3) if graph else (), host_lengths=host,
    )  # fmt: skip
    engine = Engine(model, config)
    assert engine.geometry.draft_extend_rows == 2 * count
    for _ in range(2 if memory == "cache" else 1):
        assert decode(engine, starts, COUNT) == want
    assert engine.statistics.mean_accepted > 1.1, "the test needs accepted drafts"


def dense_chain(model, head, text, count):
    """Return the tokens that transformers' layers draft after a text, without a cache; its last token is the root."""
    length, ids = len(text) - 1, list(text)
    hidden = model.hf(input_ids=torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states[-1]
    for module in range(count):
        embedded = model.embed(torch.tensor([ids[module + 1 : module + 1 + length]]))
        places = torch.arange(length)[None]
        hidden = head.module.forward_layer(module, hidden, places, None, inputs_embeds=embedded)
        ids.append(int(head.logits(hidden[0, -1], model.lm_head).argmax()))
    return ids[len(text) :]


def drafted(model, head, starts, count, **more):
    """Decode; return (chains that differ from transformers' layers, all chains, tokens a round)."""
    engine = Engine(model, EngineConfig(**SMALL, **more, max_extend_tokens=64, speculate=MtpModules(head, count)))
    seen = watch(engine)
    for prompt in starts:
        engine.submit(prompt, COUNT)
    while engine.busy:
        engine.step()
    wrong = 0
    for request, length, tokens, _ in seen:
        text = request.tokens[:length]
        if len(text) == length:
            wrong += tokens[1:].tolist() != dense_chain(model, head, text, count)
    return wrong, len(seen), engine.statistics.mean_accepted


@pytest.mark.parametrize(
    ("family", "count", "late"), [("deepseek_v3", 3, False), ("glm4_moe_lite", 2, True), ("llama", 3, True)]
)
@torch.no_grad()
def test_engine_drafts_the_chains_of_the_layers(prompts, family, count, late):
    """With random weights, every chain equals that of transformers' own layers over the whole text.

    A mistake in rows, tokens, kept features or KV that is not written again changes the tokens.
    """
    model = tiny_model(family)
    wrong, chains, _ = drafted(model, tiny_mtp(model, 1, count), prompts(3, 16), count, **(LATE if late else {}))
    assert (wrong, chains > 20) == (0, True)


@pytest.mark.parametrize("family", ["deepseek_v3", "llama"])
@torch.no_grad()
def test_chains_are_right_after_accepted_paths(prompts, family):
    """After accepted paths of several tokens, the chains still equal those of transformers' own layers."""
    model, head = pair(family, 3)
    wrong, chains, accepted = drafted(model, head, prompts(3, 12), 3, **LATE)
    assert (wrong, chains > 10) == (0, True)
    assert accepted > 1.2, "the test needs accepted drafts"


@torch.no_grad()
def test_features_of_the_next_row_change_the_chains_but_not_the_text(monkeypatch, prompts):
    """A drafter that reads the features of the next row drafts other chains, and the text stays the model's."""
    model = tiny_model("llama")
    head, starts, rows_at = tiny_mtp(model, 1, 3), prompts(3, 16), modules._rows_at
    want, _ = generate(model, starts, COUNT, EngineConfig(max_context_len=96))
    monkeypatch.setattr(
        modules, "_rows_at", lambda rows, index: rows_at(rows, (index + 1).clamp(max=rows.shape[1] - 1))
    )
    wrong, chains, _ = drafted(model, head, starts, 3)
    assert wrong > chains / 4
    assert generate(model, starts, COUNT, EngineConfig(max_context_len=96, speculate=MtpModules(head, 3)))[0] == want


def test_layers_are_read_from_the_folder(tmp_path, prompts):
    """`MtpModules` reads ``model.layers.N`` and the layers after it, and drafts as the layers that were saved."""
    model, head = tiny_mtp_pair("deepseek_v3", num_modules=2, num_nextn_predict_layers=2)
    model.hf.save_pretrained(tmp_path)
    write_mtp(tmp_path, model, head)
    loaded = load_model(tmp_path)
    read = MtpModules().open(loaded)
    for name, tensor in head.module.layers.state_dict().items():
        assert torch.equal(read.module.layers.state_dict()[name], tensor), name
    with pytest.raises(ModelError, match=r"its folder has only 2 of 3 MTP layers \(no tensor of layers.5\)"):
        MtpModules(num_modules=3).open(loaded)
    with pytest.raises(RequestError, match=r"num_modules is 3, but the head has 2 MTP layers"):
        MtpModules(head, 3)
    with pytest.raises(RequestError, match="num_modules is 0"):
        MtpModules(head, 0)
