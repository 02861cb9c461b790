"""Training of heads: unrolled chains equal decoding, and held-out prompts are not trained on."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch

from draftmark_speculative.eagle import DraftHead, HeadConfig
from draftmark_speculative.eagle.tiny import tiny_pair
from draftmark_speculative.models.tiny import tiny_model
from heads.smollm2_135m.training.acceptance import acceptance
from heads.smollm2_135m.training.held_out import check
from heads.smollm2_135m.training.prompts import HELD_OUT, SUBJECTS, TEMPLATES, training_prompts
from heads.smollm2_135m.training.text import DenseCache, Sample, Writer, frequent_tokens
from heads.smollm2_135m.training.trainer import (
    Candidate,
    Plan,
    Target,
    Trainee,
    pick,
    resume,
    save_state,
    scales,
    update,
)
from heads.smollm2_135m.training.trees import mean, tree_acceptance
from heads.smollm2_135m.training.unroll import SoftCrossEntropy, batches, collate, unroll


@pytest.fixture(scope="module")
def model():
    """Tiny Llama; its weights are never trained."""
    made = tiny_model("llama")
    made.hf.requires_grad_(False)
    return made


@pytest.fixture(scope="module")
def samples(model):
    """Greedy answers of the tiny model, in the form that training uses."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(rng.randint(3, 9))] for _ in range(6)]
    return Writer(model, 8, 10, 24, [255]).write(prompts, [0.0] * 6)


def _head(features=(0, 1, 2), vocab=None) -> DraftHead:
    torch.manual_seed(1)
    head = DraftHead(HeadConfig(48, 256, 4, 2, 12, 64, features, vocab))
    return head.requires_grad_(False).eval()


def test_batched_greedy_writing_equals_transformers(model, samples):
    """Batched greedy writing gives transformers' text in spite of left padding, the dense cache and early ends."""
    for sample in samples:
        ids = torch.tensor([sample.tokens[: sample.prompt_len]])
        how = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 255, "pad_token_id": 0}
        out = model.hf.generate(ids, attention_mask=torch.ones_like(ids), **how)
        assert out[0].tolist() == list(sample.tokens)


def test_writing_stops_at_the_stop_token(model, samples):
    """An answer ends at its first stop token."""
    stop = samples[0].answer[3]
    prompt = samples[0].tokens[: samples[0].prompt_len]
    [cut] = Writer(model, 2, 10, 24, [stop]).write([prompt], [0.0])
    assert cut.answer == samples[0].answer[: samples[0].answer.index(stop) + 1]


def test_sampling_at_a_temperature_follows_the_softmax(model):
    """Sampled tokens have the frequencies of softmax(logits / temperature)."""
    writer = Writer(model, 4000, 4, 2, [255])
    found = Counter(s.answer[0] for s in writer.write([[5, 6, 7]] * 4000, [0.7] * 4000))
    with torch.no_grad():
        wanted = (model.hf(torch.tensor([[5, 6, 7]])).logits[0, -1] / 0.7).softmax(-1)
    [likeliest] = wanted.topk(1).indices.tolist()
    spread = (wanted[likeliest] * (1 - wanted[likeliest]) / 4000).sqrt()
    assert abs(found[likeliest] / 4000 - wanted[likeliest]) < 4 * spread


def test_unrolled_chain_equals_decoding():
    """Every row of every unrolled step equals a head that runs row by row over a growing cache."""
    head, length = _head(), 8
    torch.manual_seed(2)
    embeddings, features = torch.randn(1, length, 48), torch.randn(1, length, 3 * 48)
    unrolled = list(unroll(head, embeddings, features, 3))
    for row in range(4):
        keys, values = [], []

        def attend(q, k, v, keys=keys, values=values):
            first = len(keys)
            keys.extend(k[0])
            values.extend(v[0])
            k, v = (torch.stack(rows).repeat_interleave(2, 1) for rows in (keys, values))
            scores = torch.einsum("thd,shd->hts", q[0], k) * 12**-0.5
            hidden = torch.arange(len(keys)) > first + torch.arange(q.shape[1])[:, None]
            return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)[None]

        fused, positions = head.fuse(features[:, : row + 1]), torch.arange(row + 1)
        state = head(embeddings[:, 1 : row + 2], fused, positions, attend)[:, -1:]
        torch.testing.assert_close(state[0, 0], unrolled[0][0, row])
        for step in (1, 2):
            following = embeddings[:, row + 1 + step : row + 2 + step]
            state = head(following, state, torch.tensor([row + step]), attend)
            torch.testing.assert_close(state[0, 0], unrolled[step][0, row])


def test_soft_cross_entropy_equals_autograd():
    """SoftCrossEntropy equals autograd, also if chunks do not divide the rows or labels do not sum to one."""
    torch.manual_seed(3)
    hidden, weight = torch.randn(7, 5, requires_grad=True), torch.randn(11, 5)
    labels = torch.rand(7, 11)
    ours = SoftCrossEntropy.apply(hidden, weight, labels, 3)
    [gradient] = torch.autograd.grad(ours * 2, hidden)
    plain = -(labels * (hidden @ weight.T).log_softmax(-1)).sum()
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain * 2, hidden)[0])


def test_chains_stay_inside_one_answer():
    """A row is trained on only if the token after it and all guesses of its chain belong to one answer."""
    batch = collate([[Sample((1, 2, 3, 4, 5), 2, 0.0), Sample((6, 7, 8), 1, 0.0)]])
    assert batch.tokens[0, :9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 0]
    assert [rows.tolist() for rows in batch.guessed(3)] == [[1, 2, 5], [1], []]


def test_a_pass_holds_every_sample_once(samples):
    """One pass over the batches contains every sample once, whether samples are joined or not."""
    many = list(samples) * 7
    tokens = Counter()
    for batch in batches(many, 100, random.Random(0)):
        tokens.update(batch.tokens.flatten().tolist())
    wanted = Counter(t for sample in many for t in sample.tokens)
    assert tokens - Counter({0: tokens[0]}) == wanted - Counter({0: wanted[0]})


def test_training_lowers_the_loss_and_restarts(model, samples):
    """Training lowers the loss, the finished head reads unscaled features, and a restart from it has an equal loss."""
    plan = Plan(1, vocab=200, intermediate=64, steps=3, batch_tokens=10**6)
    candidate, rng = Candidate((0, 1, 2), 1.0), random.Random(0)
    target = Target(model, [candidate])
    [batch] = target.prepare(samples, plan, rng)
    scale, (d2t, coverage) = scales([batch]), frequent_tokens(samples, 200, model)
    assert coverage == 1
    trainee = Trainee(candidate, model, d2t, pick(scale, target.layers, candidate), plan)
    losses = [update(trainee, target, batch, 3e-3).item() for _ in range(60)]
    assert losses[-1] < losses[0] - 1
    finished = trainee.finished(torch.float32)
    assert acceptance(model, finished, samples, 3)["chain"] > 2
    again = Trainee(candidate, model, d2t, pick(scale, target.layers, candidate), plan)
    again.start_from(finished)
    here, there = (update(one, target, batch, 0.0).item() for one in (trainee, again))
    assert there == pytest.approx(here, rel=1e-4)


def test_resumed_training_continues_exactly(model, samples, tmp_path):
    """A resumed training has the weights, the optimizer's moments and the step of the saved one."""
    plan = Plan(1, vocab=200, intermediate=64, steps=2, batch_tokens=10**6)
    candidate = Candidate((2,), 1.0)
    target = Target(model, [candidate])
    [batch] = target.prepare(samples, plan, random.Random(0))
    scale, (d2t, _) = pick(scales([batch]), target.layers, candidate), frequent_tokens(samples, 200, model)
    through, other = (Trainee(candidate, model, d2t, scale, plan) for _ in range(2))
    for _ in range(3):
        update(through, target, batch, 1e-3)
    save_state(tmp_path / "state.pt", [through], 3)
    [resumed], step = resume(tmp_path / "state.pt", [other])
    assert step == 3
    for _ in range(2):
        assert update(resumed, target, batch, 1e-3) == update(through, target, batch, 1e-3)


@pytest.mark.parametrize("shape", [(1, 3, 4), (3, 3, 8)])
def test_trees_without_the_engine_equal_its_trees(shape):
    """Drafting over known answers without the engine takes the engine's number of rounds; the texts are equal."""
    model, head = tiny_pair(0.01)
    known = Writer(model, 4, 4, 24, [255]).write([[7, 8], [9], [1, 2, 3]], [0.0] * 3)
    [row] = check(model, head, known, [shape], "reference")
    assert row["identical"]
    assert row["engine_rounds"] == row["rounds"]
    assert row["engine_accepted_len"] == row["accepted_len"] > 1.3


def test_chain_estimate_equals_the_tree_of_one_branch():
    """The teacher-forced estimate of a chain equals the accepted length of a tree with one branch."""
    model, head = tiny_pair(0.01)
    known = Writer(model, 4, 4, 24, [255]).write([[7, 8], [9], [1, 2, 3]], [0.0] * 3)
    chain = mean(tree_acceptance(model, head, known, [(1, 3, 4)])[1, 3, 4])
    assert chain > 1.3
    assert acceptance(model, head, known, 3)["chain"] == pytest.approx(chain, abs=1e-3)


def test_held_out_prompts_share_no_template_or_subject():
    """Held-out prompts share no template and no subject with training, except Python as a language to write in."""
    patterns = [re.compile(re.sub(r"\\\{\w+\\\}", ".+", re.escape(t)), re.S) for t in TEMPLATES]
    for prompt in HELD_OUT:
        assert not any(pattern.fullmatch(prompt) for pattern in patterns), prompt
        shared = [s for s in SUBJECTS if re.search(rf"\b{re.escape(s)}\b", prompt, re.IGNORECASE)]
        assert shared in ([], ["Python"]), prompt


def test_training_prompts_are_distinct_and_repeatable():
    """Training prompts are distinct, and the seed determines them."""
    first, again, other = (list(_take(training_prompts(seed), 3000)) for seed in (0, 0, 1))
    assert first == again != other
    assert len(set(first)) == 3000


def test_dense_cache_gives_the_models_logits(model):
    """A forward over the dense cache gives the model's own logits for one prompt without padding."""
    cache, ids = DenseCache(model, 1, 8), torch.tensor([3, 1, 4, 1, 5])
    with torch.no_grad():
        ours = model.forward(ids, torch.arange(5), cache)
        torch.testing.assert_close(ours, model.hf(ids[None]).logits[0], rtol=1e-4, atol=1e-4)


def _take(iterator, count):
    return (item for item, _ in zip(iterator, range(count), strict=False))
