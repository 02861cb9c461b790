"""Settings in vLLM's configuration, and vLLM's configuration as numbers."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftmark_engines import EngineError
from draftmark_vllm.limits import chosen_backend, engine_limits, layer_shape
from draftmark_vllm.settings import Settings


def config(
    draft: object = None, captured: list[int] | None = None, worker: str = "auto", **draftmark: object
) -> SimpleNamespace:
    """What the adapter reads of a `VllmConfig`."""
    return SimpleNamespace(
        additional_config={"draftmark": draftmark} if draftmark else {},
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        speculative_config=draft,
        parallel_config=SimpleNamespace(worker_cls=worker),
        model_config=SimpleNamespace(max_model_len=512),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
    )


def test_without_settings_the_defaults_hold() -> None:
    """As vLLM's additional_config is empty, or not a table at all."""
    assert Settings.read({}) == Settings.read(None) == Settings() == Settings(None, False)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"draftmark": "cuda_triton"}, "draftmark = 'cuda_triton', but it is a table"),
        ({"draftmark": {"bakend": "x"}}, "draftmark.bakend, but there are backend, debug, branches only"),
        ({"draftmark": {"debug": "yes"}}, "draftmark.debug = 'yes', but it is true or false"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(given: object, said: str) -> None:
    """The sentence names the setting and its value."""
    with pytest.raises(EngineError) as caught:
        Settings.read(given)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_the_named_backend_is_chosen() -> None:
    """By name, or by the device's default."""
    assert chosen_backend(config(backend="cuda_triton"), "cpu").name == "cuda_triton"
    assert chosen_backend(config(), "cpu").name == "reference"
    with pytest.raises(EngineError, match="there is no backend 'none_such'"):
        chosen_backend(config(backend="none_such"), "cpu")


def test_limits_are_vllms() -> None:
    """A verify brings a root and each draft; with drafts the host may know bounds only."""
    plain = engine_limits(config())
    assert (plain.num_draft_tokens, plain.host_lag, plain.max_num_reqs, plain.max_model_len) == (1, False, 8, 512)
    drafts = engine_limits(config(SimpleNamespace(num_speculative_tokens=4), captured=[1, 512]))
    assert (drafts.num_draft_tokens, drafts.host_lag, drafts.max_num_tokens) == (5, True, 512)
    assert drafts.branches == 1


def test_trees_have_as_many_branches_as_the_user_says() -> None:
    """Where the worker is one of `trees` and drafts; otherwise drafts are chains."""
    draft, worker = SimpleNamespace(num_speculative_tokens=6), "draftmark_vllm.trees.worker.TreeWorker"
    assert engine_limits(config(draft, worker=worker)).branches == 2
    assert engine_limits(config(draft, worker=worker, branches=3)).branches == 3
    assert engine_limits(config(None, worker=worker)).branches == 1
    with pytest.raises(EngineError, match=r"draftmark.branches = 1, but a tree has 2 or more"):
        engine_limits(config(draft, worker=worker, branches=1))


@pytest.mark.parametrize(
    ("cache_dtype", "kv_dtype"),
    [("auto", "bfloat16"), (None, "bfloat16"), ("float16", "float16"), ("fp8", "float8_e4m3fn")],
)
def test_a_layers_shape_has_vllms_dtypes(cache_dtype: str | None, kv_dtype: str) -> None:
    """ "auto" is the model's own; a window counts positions to the left."""
    shape = layer_shape(8, 2, 64, None, torch.bfloat16, cache_dtype, 0.1, 32, None)
    assert (shape.kv_dtype, shape.window_left, shape.page_size, shape.softmax_scale) == (kv_dtype, 31, 16, 0.1)
