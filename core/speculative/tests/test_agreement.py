"""The near-tie rule: texts may differ where rounding decides, and nowhere else."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from draftmark_speculative import EngineConfig, Sampling, generate
from draftmark_speculative.agreement import CAP, Agreement, LogitError
from draftmark_speculative.compare import compare
from draftmark_speculative.models.tiny import tiny_model

HALVES = ("bfloat16", "float16")
PROMPTS = [[first, first + 1] for first in range(0, 40, 2)]


@pytest.fixture(scope="module")
def halves():
    """Return a tiny model in bfloat16 and one in float16, by dtype."""
    return {dtype: tiny_model("llama", dtype=dtype) for dtype in HALVES}


def float32_row(model, prompt):
    """Return the logits after every token of a float32 copy of the model, and of the model in its own dtype."""
    exact = copy.deepcopy(model.hf).float()
    with torch.no_grad():
        return [one(torch.tensor([prompt])).logits[0].float() for one in (exact, model.hf)]


@pytest.mark.parametrize("dtype", HALVES)
def test_only_tokens_within_rounding_error_pass(halves, dtype):
    """A token counts as a near-tie exactly if twice transformers' own error covers its gap to the best logit.

    No backend is used.
    """
    model, seen = halves[dtype], set()
    for prompt in PROMPTS:
        wanted, got = float32_row(model, prompt)
        order = wanted[-1].argsort(descending=True).tolist()
        best = wanted.topk(10).indices
        bound = 2 * float((got - wanted).gather(1, best).abs().max())
        for rank in (1, 20):
            tie = float(wanted[-1, order[0]] - wanted[-1, order[rank]]) < bound
            found = compare(model, [prompt], [[order[0]]], {"other": [[order[rank]]]})
            assert found.bound == pytest.approx(bound)
            assert found.right is found.excuses(0, "other") is tie
            # Without a baseline the rule checks the tokens of the text itself.
            assert compare(model, [prompt], [[order[rank]]], {}).right is tie
            seen.add(tie)
    assert seen == {True, False}


def test_every_token_is_checked(halves):
    """A wrong token after a near-tie, or in a text that equals its baseline, is reported with its index."""
    model = halves["bfloat16"]
    outs, _ = generate(model, [[5, 6, 7]], 12, EngineConfig(max_context_len=32))
    text = list(outs[0].tokens)
    assert compare(model, [[5, 6, 7]], [text], {"same": [text]}).right
    wrong = [*text[:9], int(float32_row(model, [5, 6, 7, *text[:9]])[0][-1].argmin()), *text[10:]]
    found = compare(model, [[5, 6, 7]], [wrong], {"same": [wrong]})
    assert not found.differences
    assert found.wrong_texts == {0}
    assert found.wrong_choices[0][0] == 9


def test_in_float32_texts_are_equal_or_wrong():
    """In float32 any difference from a baseline is wrong; the model does not run."""
    model = tiny_model("llama")
    assert compare(model, [[1]], [[2, 3]], {"a": [[2, 3]], "b": [[2, 3]]}).right
    found = compare(model, [[1]], [[2, 3]], {"a": [[2, 4]], "b": [[2, 3, 5]]})
    assert (found.differences, found.wrong_texts, found.bound) == ({(0, "a"): 1, (0, "b"): 2}, {0}, 0)


def test_sampled_texts_are_equal_or_wrong(halves):
    """A sampled text must equal its baseline, because a sample may lie far below the best token."""
    config = EngineConfig(max_context_len=32, sampling=Sampling(1.0))
    found = compare(halves["bfloat16"], [[1, 2]], [[7, 8]], {"a": [[7, 8]], "b": [[7, 9]]}, config)
    assert (found.wrong_texts, found.choices, found.gaps) == ({0}, {}, {})
    assert found.wrong_logits is None
    assert found.backend is not None


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_right_backend_rounds_as_transformers_does(family, dtype):
    """The reference backend's logit error is 0.5 to 1.5 times transformers' own, and its text is right."""
    model, prompts = tiny_model(family, dtype=dtype), [[3, 1, 4, 1, 5], [9, 2, 6]]
    config = EngineConfig(max_context_len=64)
    outs, _ = generate(model, prompts, 20, config)
    texts = [out.tokens for out in outs]
    found = compare(model, prompts, texts, {"same": texts}, config)
    assert found.right, found
    assert 0.5 < found.backend.rms / found.rounding.rms < 1.5
    assert 0 < found.rounding.largest < found.cap


ERROR = LogitError(0.4, 0.1)


@pytest.mark.parametrize(
    ("rounding", "cap", "bound"),
    [(ERROR, 1.0, 0.8), (ERROR, 0.3, 0.6), (LogitError(math.nan, math.nan), 0.3, 0), (LogitError(math.inf, 1), 0.3, 0)],
)
def test_the_bound_has_a_cap(rounding, cap, bound):
    """With huge rounding errors, logit gaps up to the cap are near-ties. If the model overflows, no gap is one."""
    found = Agreement({(0, "a"): 3}, "float16", rounding, cap, gaps={(0, "a"): 0.59}, choices={0: (3, 0.7)})
    assert found.bound == bound
    assert found.excuses(0, "a") is (bound > 0)
    assert found.wrong_texts == (set() if bound == 0.8 else {0})
    assert CAP == 64


@pytest.mark.parametrize(
    ("rounding", "backend", "named"),
    [
        (ERROR, LogitError(9.0, 0.2), None),
        (ERROR, LogitError(0.1, 0.21), "differ from a float32 model's by 0.21"),
        (ERROR, LogitError(math.nan, math.nan), "differ from a float32 model's by nan"),
        (LogitError(math.inf, math.nan), LogitError(0.1, 0.1), "not finite in float16"),
        (None, None, None),
    ],
)
def test_backend_logit_error_limit_is_twice_the_own_error(rounding, backend, named):
    """A backend's logit error may be twice transformers' own (root mean square); NaN never passes."""
    found = Agreement({}, "float16", rounding, 1.0, backend)
    assert found.right is (named is None)
    assert named is None or named in found.wrong_logits
