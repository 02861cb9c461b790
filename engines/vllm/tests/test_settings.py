"""Tests of draftmark's settings in vLLM's configuration, and of the limits that are read from the configuration."""

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
    """Return the parts of a `VllmConfig` that the adapter reads."""
    return SimpleNamespace(
        additional_config={"draftmark": draftmark} if draftmark else {},
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        speculative_config=draft,
        parallel_config=SimpleNamespace(worker_cls=worker),
        model_config=SimpleNamespace(max_model_len=512),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=captured),
    )


def test_without_settings_the_defaults_hold() -> None:
    """If vLLM's additional_config is empty or is not a dict, the settings have their defaults."""
    assert Settings.read({}) == Settings.read(None) == Settings() == Settings(None, False)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"draftmark": "cuda_triton"}, "draftmark = 'cuda_triton', not a table"),
        ({"draftmark": {"bakend": "x"}}, "draftmark.bakend, which is unknown; use backend, debug, branches"),
        ({"draftmark": {"debug": "yes"}}, "draftmark.debug = 'yes'; write true or false"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(given: object, text: str) -> None:
    """A bad setting raises an error of one sentence that contains the setting and its value."""
    with pytest.raises(EngineError) as caught:
        Settings.read(given)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_the_named_backend_is_chosen() -> None:
    """The setting selects a backend; without it the device's default is used."""
    assert chosen_backend(config(backend="cuda_triton"), "cpu").name == "cuda_triton"
    assert chosen_backend(config(), "cpu").name == "reference"
    with pytest.raises(EngineError, match="backend 'none_such' does not exist"):
        chosen_backend(config(backend="none_such"), "cpu")


def test_limits_follow_vllms_configuration() -> None:
    """The limits follow vLLM's configuration: 4 drafts give verify steps of 5 rows, and host lengths can be bounds."""
    plain = engine_limits(config())
    assert (plain.num_draft_tokens, plain.host_lag, plain.max_num_reqs, plain.max_model_len) == (1, False, 8, 512)
    drafts = engine_limits(config(SimpleNamespace(num_speculative_tokens=4), captured=[1, 512]))
    assert (drafts.num_draft_tokens, drafts.host_lag, drafts.max_num_tokens) == (5, True, 512)
    assert drafts.branches == 1


def test_branches_follow_the_setting() -> None:
    """The setting `branches` applies only with drafts and a worker of `trees`. Otherwise drafts are chains."""
    draft, worker = SimpleNamespace(num_speculative_tokens=6), "draftmark_vllm.trees.worker.TreeWorker"
    assert engine_limits(config(draft, worker=worker)).branches == 2
    assert engine_limits(config(draft, worker=worker, branches=3)).branches == 3
    assert engine_limits(config(None, worker=worker)).branches == 1
    with pytest.raises(EngineError, match=r"draftmark.branches = 1; write an integer of 2 or more"):
        engine_limits(config(draft, worker=worker, branches=1))


@pytest.mark.parametrize(
    ("cache_dtype", "kv_dtype"),
    [("auto", "bfloat16"), (None, "bfloat16"), ("float16", "float16"), ("fp8", "float8_e4m3fn")],
)
def test_a_layers_shape_has_vllms_dtypes(cache_dtype: str | None, kv_dtype: str) -> None:
    """KV dtype "auto" means the query's dtype. With a window of 32, a row sees 31 positions to its left."""
    shape = layer_shape(8, 2, 64, None, torch.bfloat16, cache_dtype, 0.1, 32, None)
    assert (shape.kv_dtype, shape.window_left, shape.page_size, shape.softmax_scale) == (kv_dtype, 31, 16, 0.1)
