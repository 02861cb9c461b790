"""Life of requests: joining, cancelling, memory limits, and rejected settings and requests."""

import numpy as np
import pytest
import torch

from draftmark.errors import BackendLoadError, GeometryError, RequestError
from draftmark_speculative import Eagle, Engine, EngineConfig, HostKind, Ngram, decode, generate
from draftmark_speculative.allocator import CacheExhausted


def test_requests_join_between_steps(make_model, plain_text, prompts):
    """A request submitted while others decode gets its own text, and the others' texts do not change."""
    starts = prompts(3, 12, seed=4)
    engine = Engine(make_model("llama"), EngineConfig(max_num_reqs=3, max_context_len=64))
    ids = [engine.submit(starts[0], 12), engine.submit(starts[1], 12)]
    for _ in range(4):
        engine.step()
    ids.append(engine.submit(starts[2], 12))
    while engine.busy:
        engine.step()
    assert [engine.output(i) for i in ids] == [plain_text("llama", tuple(p), 12) for p in starts]


@pytest.mark.parametrize("late", [{}, {"overlap": True, "host_lengths": HostKind.UNKNOWN}], ids=["in step", "late"])
def test_host_syncs_are_counted(make_model, prompts, late):
    """The engine waits once a round, and once for a prefill that ends a prompt; overlap adds no round."""
    _, engine = generate(make_model("llama"), prompts(1, 9), 8, EngineConfig(max_context_len=32, **late))
    assert (engine.statistics.rounds, engine.statistics.late, engine.statistics.host_syncs) == (7, 0, 8)


def test_drafting_adds_no_wait(markov, prompts):
    """With a draft head the engine still waits once a round, and once for a prefill that ends a prompt."""
    model, head = markov(0.01)
    _, engine = generate(model, prompts(1, 9), 8, EngineConfig(speculate=Eagle(head, 2, 3, 6), max_context_len=32))
    assert engine.statistics.host_syncs == engine.statistics.rounds + 1


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"backend": "nosuch"}, BackendLoadError, "'nosuch'"),
        ({"page_size": 0}, GeometryError, "attention.page_size is 0"),
        ({"speculate": Ngram(topk=0)}, GeometryError, "draft.topk is 0"),
        ({"speculate": Ngram(num_draft_tokens=0)}, GeometryError, "draft.num_draft_tokens is 0"),
        ({"max_context_len": 0}, GeometryError, "limits.max_context_len is 0"),
        ({"max_num_reqs": 0}, GeometryError, "limits.max_num_reqs is 0"),
        ({"max_num_reqs": 2.5, "graph": True}, RequestError, "max_num_reqs is 2.5, but it must be an integer"),
        ({"max_context_len": "64"}, RequestError, "max_context_len is '64', but it must be an integer"),
        ({"num_pages": 7.0}, RequestError, "num_pages is 7.0"),
        ({"num_pages": 0}, RequestError, "num_pages is 0, but it must be >= 1"),
        ({"overlap": "no"}, RequestError, "overlap is 'no', but it must be True or False"),
        ({"backend": 3}, RequestError, "backend is 3, but it must be a name"),
        ({"sampling": None}, RequestError, "sampling is None, but it must be a Sampling"),
        ({"max_context_len": 257}, GeometryError, "257, but model 'tiny-llama' was made for 256"),
    ],
)
def test_bad_configurations_are_rejected(make_model, settings, error, named):
    """Each bad setting raises a one-sentence error that names it, before any token."""
    with pytest.raises(error, match=named):
        Engine(make_model("llama"), EngineConfig(**{"max_context_len": 64, **settings}))


@pytest.mark.parametrize(
    ("prompt", "count", "named"),
    [([], 4, "0 tokens"), ([1] * 32, 4, "32 tokens, but max_context_len is 32"), ([1], 0, "max_new_tokens is 0"),
     ([1, 999], 4, "token 999"), ([-1], 4, "token -1"), ([1], 2.5, "2.5\\) is not an integer"),
     ([1], float("inf"), "is not an integer"), ([1.5, 2], 4, "is not an integer")],
)  # fmt: skip
def test_bad_requests_are_rejected_and_others_continue(make_model, prompt, count, named):
    """A bad request raises an error, and the requests already submitted continue."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    good = engine.submit([1, 2, 3], 5)
    with pytest.raises(RequestError, match=named):
        engine.submit(prompt, count)
    while engine.busy:
        engine.step()
    assert len(engine.output(good)) == 5


@pytest.mark.parametrize("stop", [3, ["x"], [1.5]])
def test_stop_tokens_are_integers(make_model, stop):
    """A stop token that is not an integer raises an error: no output could contain it."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    with pytest.raises(RequestError, match="but it must be token ids"):
        engine.submit([1], 4, stop)
    assert not engine.busy


def test_a_prompt_may_be_an_array_or_a_tensor(make_model, plain_text):
    """A prompt may be a list, an array or a tensor of integers; the text is equal."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    kinds = [[5, 6, 7], np.array([5, 6, 7]), torch.tensor([5, 6, 7])]
    outs = decode(engine, kinds, np.int64(6))
    assert [out.tokens for out in outs] == [plain_text("llama", (5, 6, 7), 6)] * 3


def test_rejected_prompt_removes_its_list(make_model):
    """When `decode` rejects a prompt, it removes the prompts that it had queued before."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    with pytest.raises(RequestError, match="token -1"):
        decode(engine, [[1, 2], [-1]], 4)
    assert not engine.busy
    assert len(decode(engine, [[3, 4]], 4)) == 1
    assert engine.statistics.tokens == 4


def test_a_released_request_is_forgotten(make_model):
    """A released request is cancelled if it runs, and its id is unknown afterwards."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    done, running = engine.submit([1, 2], 1), engine.submit([3, 4], 20)
    engine.step()
    assert len(engine.output(done)) == 1
    engine.release(done), engine.release(running)
    assert not engine.busy and not engine._requests and engine.pages.in_use == 0
    for call in (engine.output, engine.cancel, engine.release):
        with pytest.raises(RequestError, match=r"request \d is not here"):
            call(done)


def test_decode_keeps_no_requests(make_model):
    """An engine that decodes several lists of prompts keeps no request."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=32))
    for _ in range(3):
        assert len(decode(engine, [[1, 2], [3]], 2)) == 2
        assert not engine._requests


def test_engine_beyond_device_memory_is_rejected(make_model):
    """An engine that needs more memory than the device has raises an error with the sizes, before any allocation."""
    config = EngineConfig(max_context_len=64, num_pages=1 << 40)
    with pytest.raises(RequestError, match=r"1,099,511,627,776 KV pages take [\d,.]+ GiB .* but cpu has [\d,.]+ GiB"):
        Engine(make_model("llama"), config)


def test_request_beyond_the_pool_is_rejected(make_model):
    """A request with more KV than the whole pool is rejected on submit, so an admitted request always finishes."""
    engine = Engine(make_model("llama"), EngineConfig(max_context_len=64, page_size=4, num_pages=6))
    with pytest.raises(CacheExhausted, match="are free; finish or cancel"):
        engine.submit([1] * 10, 30)
    small = engine.submit([1] * 4, 4)
    while engine.busy:
        engine.step()
    assert len(engine.output(small)) == 4


def test_kernels_are_prepared_before_the_first_graph(make_model, opening_order):
    """One call prepares the kernels of every geometry; buffers, backends and graphs come after it."""
    speculate = Ngram(topk=2, num_draft_tokens=4)
    Engine(make_model("llama"), EngineConfig(max_context_len=64, max_num_reqs=2, graph=True, speculate=speculate))
    names = [name for name, _ in opening_order]
    assert names[0] == "prepare" and names.count("prepare") == 1
    assert names.index("bind") < names.index("capture")
    assert [one for name, one in opening_order if name == "bind"] == opening_order[0][1]
