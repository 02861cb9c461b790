"""`draftmark generate --check` fails on wrong backends in half precision, where rounding differences are allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftmark.batch import ForwardBatch
from draftmark.cache import KVCache
from draftmark.geometry import Mode
from draftmark_reference.backend import ReferenceBackend

Attend = Callable[[ReferenceBackend, torch.Tensor, KVCache, ForwardBatch, torch.Tensor], None]
right = ReferenceBackend.attend
PROMPTS = ("--prompt-ids", "1,2,3,4,1,2,3", "--prompt-ids", "9,8,7", "--prompt-ids", "5,6,5,6,5,6,5,6,5")


def then(change: Callable[[torch.Tensor], Any], *modes: Mode) -> Attend:
    """Return an attend function that runs the reference, then changes its output in these modes or in every mode."""

    def attend(self: ReferenceBackend, q: Any, cache: Any, batch: ForwardBatch, out: torch.Tensor) -> None:
        right(self, q, cache, batch, out)
        if not modes or batch.mode in modes:
            change(out)

    return attend


def noise(out: torch.Tensor) -> None:
    """Add noise that depends only on the output, so that runs repeat exactly."""
    out.add_(0.05 * torch.sin(1e4 * out.float()).to(out.dtype))


def of_queries(scale: float) -> Attend:
    """Return an attend function with wrongly scaled scores."""
    return lambda self, q, cache, batch, out: right(self, q * scale, cache, batch, out)


def old_metadata(self: ReferenceBackend, q: Any, cache: Any, batch: ForwardBatch, out: Any) -> None:
    """Attend with lengths that are one token too short: the newest key is not visible."""
    self._kv_lens[: batch.padded_reqs].sub_(1).clamp_(min=1)
    right(self, q, cache, batch, out)
    self._kv_lens[: batch.padded_reqs].add_(1)


def coarse_cache(self: ReferenceBackend, q: Any, cache: KVCache, batch: ForwardBatch, out: Any) -> None:
    """Attend over KV rounded to eight bits."""
    k, v = (pages.to(torch.float8_e4m3fn).to(pages.dtype) for pages in (cache.k, cache.v))
    right(self, q, KVCache(k, v), batch, out)


WRONG: dict[str, Attend] = {
    "writes zeros": then(torch.Tensor.zero_),
    "halves queries": of_queries(0.5),
    "drops a head": then(lambda out: out[:, 0].zero_()),
    "adds noise": then(noise),
    "scales its output by 0.9": then(lambda out: out.mul_(0.9)),
    "scales scores by 0.9": of_queries(0.9),
    "swaps two heads": then(lambda out: out[:, :2].copy_(out[:, :2].flip(1))),
    "does not see the newest key": old_metadata,
    "keeps KV in eight bits": coarse_cache,
    "writes NaN": then(lambda out: out.fill_(float("nan"))),
    "writes zeros in rounds only": then(torch.Tensor.zero_, Mode.VERIFY, Mode.DECODE),
    "drops a head in VERIFY only": then(lambda out: out[:, 0].zero_(), Mode.VERIFY),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny Llama with 64 tokens."""
    from draftmark_speculative.models.tiny import tiny_hf_model

    path = tmp_path_factory.mktemp("models") / "llama-64"
    tiny_hf_model("llama", vocab_size=64).save_pretrained(path)
    return path


@pytest.fixture
def check(draftmark: Callable[..., Any], model: Path) -> Callable[..., Any]:
    """Return a function that decodes three texts of 16 tokens with --check in one dtype."""

    def run(dtype: str, *argv: str) -> Any:
        return draftmark(
            "generate", "--model", model, *PROMPTS, "--max-new-tokens", 16, "--check", "--dtype", dtype, *argv
        )

    return run


HALVES = ("bfloat16", "float16")
BOTH = [
    pytest.param(wrong, dtype, marks=[] if dtype == HALVES[number % 2] else pytest.mark.slow)
    for number, wrong in enumerate(WRONG)
    for dtype in HALVES
]
"""Each wrong backend in one of the two dtypes; `make test-all` runs both."""


@pytest.mark.parametrize(("wrong", "dtype"), BOTH)
def test_a_wrong_backend_fails(
    check: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, wrong: str, dtype: str
) -> None:
    """A wrong backend gives exit code 1 and one sentence about texts or logits."""
    monkeypatch.setattr(ReferenceBackend, "attend", WRONG[wrong])
    done = check(dtype)
    assert done.code == 1, done.out
    error = done.err.splitlines()[-1]
    assert re.match(r"draftmark generate: (\d of 3 texts differ|the backend's logits differ) ", error), done.err


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_right_backend_passes(check: Callable[..., Any], dtype: str) -> None:
    """The right backend passes, and the report shows its logit error next to transformers' own."""
    done = check(dtype)
    assert done.code == 0, done.out + done.err
    line = r"logits: 0\.\d+ from a float32 model's .* transformers' own differ by 0\.\d+, and 2 times"
    assert re.search(line, done.out), done.out
    found = check(dtype, "--json").json["check"]["logit_error"]
    assert 0 < found["backend"]["rms"] < 2 * found["transformers"]["rms"]
    assert found["wrong"] is None
