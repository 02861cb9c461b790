"""Draft trees by plain recomputation over each path, and a recorder of the trees that an engine drafts."""

from __future__ import annotations

import torch

from draftmark_speculative import Eagle, Engine, EngineConfig
from draftmark_speculative.eagle import dense_attention

COUNT = 12
SMALL = {"page_size": 4, "max_num_reqs": 3, "max_context_len": 64, "max_extend_tokens": 7, "guard": True}


def dense_paths(model, head, text, topk, steps, nodes):
    """Return the token paths from the root to the best `nodes` - 1 candidates, by plain recomputation.

    Args:
        text: committed tokens and the root.
    """
    ids, length = torch.tensor(text), len(text) - 1
    states = model.hf(input_ids=ids[None, :-1], output_hidden_states=True).hidden_states
    base = head.fuse(torch.cat([states[layer][0] for layer in head.feature_layers], -1))

    def best(path):
        """Return the head's topk tokens after a path of drafted tokens, each with its score."""
        fused = base
        for count in range(len(path) + 1):
            tokens = torch.cat((ids[1:], torch.tensor(path[:count], dtype=torch.int64)))
            hidden = head(model.embed(tokens), fused, torch.arange(length + count), dense_attention)
            fused = torch.cat((base, hidden[length - 1 :]))
        scores, indices = head.logits(hidden[-1], model.lm_head).log_softmax(-1).topk(topk)
        return list(zip(scores.tolist(), head.target_tokens(indices).tolist(), strict=True))

    beams = [(score, (token,)) for score, token in best(())]
    found = list(beams)
    for _ in range(steps - 1):
        level = [(score + more, (*path, token)) for score, path in beams for more, token in best(path)]
        found += level
        beams = sorted(level, key=lambda one: -one[0])[:topk]
    return {path for _, path in sorted(found, key=lambda one: -one[0])[: nodes - 1]}


def planted_paths(tokens, parents):
    """Return the token paths of the draft tree that the engine wrote for one request."""
    paths = [()]
    for token, parent in list(zip(tokens.tolist(), parents.tolist(), strict=True))[1:]:
        paths.append(() if token < 0 else (*paths[parent], token))
    return {path for path in paths if path}


def watch(engine):
    """Record every tree that the engine drafts, with its request and the length of the text before it."""
    seen, draft = [], engine._drafting.draft

    def watched(requests, padded, host):
        mode = draft(requests, padded, host)
        rows = {request.row: request for request in engine._scheduler.running}
        for entry in range(len(requests)):
            request = rows[engine._state.rows[entry].item()]
            root = int(engine._state.lengths.device[request.row]) + 1
            trees = engine._state.tokens[entry].clone(), engine._state.parents[entry].clone()
            seen.append((request, root, *trees))
        return mode

    engine._drafting.draft = watched
    return seen


def compare(model, head, prompts, shape, drafts=Eagle, dense=None, **more):
    """Decode with one engine; return (trees that differ from the dense trees, all trees, tokens per round).

    Args:
        drafts: the speculation of `head`.
        dense: an object like `head` for the dense trees; None means `head`.
    """
    config = EngineConfig(**{**SMALL, **more}, speculate=drafts(head, *shape))
    engine = Engine(model, config)
    seen = watch(engine)
    for prompt in prompts:
        engine.submit(prompt, COUNT)
    while engine.busy:
        engine.step()
    wrong = 0
    for request, length, tokens, parents in seen:
        text = request.tokens[:length]
        if len(text) < length:
            continue  # with overlap, the root's token was dropped because the request had ended
        wrong += planted_paths(tokens, parents) != dense_paths(model, dense or head, text, *shape)
    return wrong, len(seen), engine.statistics.mean_accepted
