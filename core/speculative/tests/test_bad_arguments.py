"""Every public constructor and call of the loop with bad values: each error is one sentence that names the field."""

import math

import pytest

from draftmark.errors import DraftmarkError
from draftmark_speculative import Adaptive, CostTable, DraftHead, Eagle, Engine, EngineConfig, Ngram, Sampling, decode
from draftmark_speculative.adaptive.costs import Cost
from draftmark_speculative.eagle.config import HeadConfig
from draftmark_speculative.ngram import LONGEST_NGRAM

NAN, INF = math.nan, math.inf
OTHERS = (None, "8", 1.0, 2.5, True, NAN, INF, [4], {}, object)
"""Values that are not counts, although some compare like one."""
COUNT = (*OTHERS, 0, -1)
NO_NUMBER = (None, "0.5", NAN, INF, -INF, True, [0.5], 1j, 10**400)
SWITCH = ("yes", 0, 1, [], 2.0)
SIZES = (4, "4", None, (0,), (-1,), (1.5,), ("4",), (True,))
HEAD = {"hidden_size": 8, "vocab_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 8, "feature_layers": (0,)}  # fmt: skip
ONE = {1: Cost(1.0)}


def opened(model, **fields):
    """Submit a request to an engine with these settings; some drafters are only made for a request."""
    return Engine(model, EngineConfig(**{"max_context_len": 32, "max_num_reqs": 2, **fields})).submit([1, 2], 1)


def config(model, **fields):
    return EngineConfig(**fields)


def drafting(speculation, **fixed):
    return lambda model, **fields: opened(model, speculate=speculation(**fixed, **fields))


def made(kind, **fixed):
    return lambda model, **fields: kind(**{**fixed, **fields})


def request(model, **fields):
    return Engine(model, EngineConfig(max_context_len=32)).submit(**{"prompt": [1], "max_new_tokens": 1, **fields})


def output_of(model, request_id):
    return Engine(model, EngineConfig(max_context_len=32)).output(request_id)


def decoded(model, prompts):
    return decode(Engine(model, EngineConfig(max_context_len=32)), prompts, 1)


TABLE = [
    (opened, {
        **dict.fromkeys(("page_size", "max_num_reqs", "max_context_len", "max_extend_tokens"), COUNT),
        "num_pages": (*COUNT[1:],), "backend": ("nosuch", 3, None, "", ["reference"]),
        "host_lengths": ("bogus", 3, None, True, ""), "sampling": (None, 0.5, "greedy"),
        "speculate": ("ngram", 3, Ngram, True), "capture_batch_sizes": SIZES,
        **dict.fromkeys(("graph", "overlap", "guard"), SWITCH),
    }),
    (drafting(Ngram), {**dict.fromkeys(("topk", "num_draft_tokens"), COUNT), **dict.fromkeys(
        ("max_ngram", "min_ngram"), (*COUNT, LONGEST_NGRAM + 1, 10**30))}),
    (made(Ngram, max_ngram=2), {"min_ngram": (3,)}),
    (made(Eagle), {"head": (3, [], b"x")}),
    (made(Adaptive, drafts=Ngram()), {"drafts": (None, "eagle", 3, Ngram), "budgets": (4, "4", None),
                                      "costs": ("fast", 3, {}), "probe_share": (*NO_NUMBER, -0.1, 1, 2.0)}),
    (drafting(Adaptive, drafts=Ngram()), {"budgets": ((0,), (-1,), (1.5,), ("4",), (True,))}),
    *[(made(CostTable, plain=ONE, verify=ONE), {name: (None, 3, {0: Cost(1.0)}, {"1": Cost(1.0)}, {1.5: Cost(1.0)},
        {1: 1.0}, {1: Cost(0.0)}, {1: Cost("1")}, {1: Cost(NAN)}, {1: Cost(INF)}, {1: Cost(1.0, -1.0)})})
      for name in ("plain", "verify", "drafting", "catching_up")],
    (made(Sampling), {"temperature": (*NO_NUMBER, -0.5), "top_p": (*NO_NUMBER, 0.0, 1.5), "seed": OTHERS}),
    (made(HeadConfig, **HEAD), {
        **{name: (*COUNT, 10**30) for name in HEAD if name != "feature_layers"}, "draft_vocab_size": (*COUNT[1:], 17),
        "feature_layers": (None, 3, "0", (), (-1,), (1.5,), ("0",), (1, 0), (0, 0), (True,), [None]),
        "rope_theta": (*NO_NUMBER, 0, -1.0), "rms_norm_eps": (*NO_NUMBER, -1.0), "target": (None, 3, [])}),
    (request, {"prompt": (None, 3, "abc", [], [1.5], ["a"], [True], [-1], [256], [10**30], [[1]], [1] * 32),
               "max_new_tokens": COUNT, "stop": (3, "abc", [1.5], ["a"], [True], [-1], [256])}),
    (output_of, {"request_id": (99, None, "0", 1.5, [0])}),
    (decoded, {"prompts": (None, 3, "abc", [3], [[]])}),
]  # fmt: skip
ROWS = [(call, field, bad) for call, fields in TABLE for field, values in fields.items() for bad in values]
SAID = {"request_id": "request ", "prompts": "prompt"}
"""Text in the error if that is not the field's name."""


@pytest.mark.parametrize(("call", "field", "bad"), ROWS, ids=[f"{field}={bad!r:.30}" for _, field, bad in ROWS])
def test_a_bad_argument_is_one_sentence(make_model, call, field, bad):
    """A bad argument raises a one-sentence error with the field and a remedy, never another library's error."""
    with pytest.raises(DraftmarkError) as caught:
        call(make_model("llama"), **{field: bad})
    text = str(caught.value)
    assert SAID.get(field, field) in text and ";" in text and "\n" not in text, text


@pytest.mark.parametrize(
    ("model", "settings", "named"),
    [(None, EngineConfig(), "model is None"), ("m", EngineConfig(), "model is 'm'"), (0, {}, "config is {}")],
)
def test_engine_rejects_other_argument_types(make_model, model, settings, named):
    """An engine takes a model and an EngineConfig, in that order; other types raise an error."""
    with pytest.raises(DraftmarkError, match=named):
        Engine(make_model("llama") if model == 0 else model, settings)


def test_largest_max_ngram_is_accepted(make_model):
    """The largest max_ngram is accepted."""
    assert opened(make_model("llama"), speculate=Ngram(max_ngram=LONGEST_NGRAM)) == 0


def test_draft_vocabulary_may_equal_the_targets():
    """A draft vocabulary as large as the target's is accepted."""
    assert DraftHead(HeadConfig(**HEAD, draft_vocab_size=16)).d2t.tolist() == list(range(16))
