"""Models of many families: what vLLM's own attention says, or one sentence before weights are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("vllm")

from draftmark_vllm.versions import VLLM
from engines.vllm.tests.engine_run import Asked, Said
from engines.vllm.tests.families import REFUSED, SERVED
from engines.vllm.tests.sweep import NEW_TOKENS, SUFFIX, assert_alike, each

pytestmark = pytest.mark.usefixtures("stand_ins")

QUICK = {"gemma-3", "gemma-3n", "gpt-oss", "llama-4", "bloom", "deepseek-v2", "hrm-text"}
"""Windows 5 to 1, layers that share KV, sinks, chunks; ALiBi, MLA, prefixes that see ahead."""


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the models."""
    return tmp_path_factory.mktemp("families")


def say(name: str, folder: Path, backend: str | None, arguments: dict[str, object]) -> Said:
    """What a family says, with log-probabilities."""
    model, needed = SERVED[name].write(folder, name), SERVED[name].arguments
    return Asked(model, backend, new_tokens=NEW_TOKENS, logprobs=True, arguments={**arguments, **needed}).run()


@each(SERVED, QUICK)
def test_a_family_says_what_it_says_with_vllms_attention(folder: Path, name: str) -> None:
    """In float32, with drafts of other numbers of tokens each step, over pages of 16 unless vLLM needs larger ones."""
    since = SERVED[name].since
    if since and VLLM.installed_before(since):
        pytest.skip(f"vLLM before {since} does not run this on a CPU itself")
    said = say(name, folder, "reference", {"block_size": 16, "speculative_config": SUFFIX})
    wanted = say(name, folder, None, {"block_size": 32})
    assert_alike(said, wanted)
    assert (said.drafted > 0) is ("speculative_config" not in SERVED[name].arguments)


@each(REFUSED, QUICK)
def test_a_family_is_refused_in_one_sentence(folder: Path, name: str) -> None:
    """vLLM has its configuration alone here, so nothing of it is loaded."""
    family, sentence = REFUSED[name]
    arguments = {"block_size": 16, "max_num_batched_tokens": 256}
    with pytest.raises(RuntimeError) as caught:
        Asked(family.write(folder, name), "reference", arguments=arguments).run()
    assert sentence in str(caught.value), str(caught.value)
