"""What the documents print is what runs: the tutorial's package is built and loaded, the README's program is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(*command: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command in a process of its own, with `path` first among Python's folders."""
    environment = {**os.environ, "PYTHONPATH": str(path) if path else "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def tugboat(tmp_path_factory):
    """The tutorial's package, built by pip into a folder of its own."""
    source, site = tmp_path_factory.mktemp("tugboat"), tmp_path_factory.mktemp("site")
    for _, name, text in BLOCK.findall((ROOT / "docs" / "writing-a-backend.md").read_text()):
        if name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_text(text)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation")
    done = run(*pip, "--target", str(site), str(source))
    assert done.returncode == 0, done.stderr
    return site


def test_the_tutorials_backend_is_found_sized_and_examined(tugboat):
    """`list`, `size` and `doctor` of the tutorial's last step work."""
    cli = (sys.executable, "-m", "draftmark.cli")
    assert "tugboat" in run(*cli, "list", path=tugboat).stdout
    size = run(*cli, "size", "tugboat", "--topk", "4", "--num-draft-tokens", "16", path=tugboat)
    assert size.returncode == 0 and "slots" in size.stdout, size.stderr
    doctor = run(*cli, "doctor", "tugboat", path=tugboat)
    assert doctor.returncode == 0 and "ready" in doctor.stdout, doctor.stdout + doctor.stderr


SAME_TEXT = """
import random
from draftmark_speculative import DraftTree, EngineConfig, HostKind, Ngram, generate
from draftmark_speculative.models.tiny import tiny_model

for family in ("llama", "mistral"):
    model = tiny_model(family, vocab_size=16)
    draw = random.Random(0)
    prompts = [[draw.randrange(16) for _ in range(n)] for n in (3, 17, 9)]
    texts = []
    for backend in ("reference", "tugboat"):
        for graph in (False, True):
            config = EngineConfig(
                backend=backend, speculate=Ngram(3, 7, 2, 1), graph=graph, page_size=4, max_context_len=64,
                host_lengths=HostKind.UNKNOWN, guard=True, max_num_reqs=3, max_extend_tokens=20,
            )
            outs, engine = generate(model, prompts, 24, config)
            assert engine.statistics.mean_accepted > 1.1, engine.statistics
            texts.append([out.tokens for out in outs])
    assert all(text == texts[0] for text in texts), texts
print("the same text")
"""


def test_the_tutorials_backend_decodes_like_the_reference(tugboat):
    """Trees, windows, chunked prefill, eager and recorded graphs: the same text as on the reference backend."""
    done = run(sys.executable, "-c", SAME_TEXT, path=tugboat)
    assert done.stdout == "the same text\n", done.stderr[-2000:]


def test_the_readmes_program_prints_what_the_readme_says():
    """The minimal program runs, and its output is the one printed below it."""
    blocks = BLOCK.findall((ROOT / "README.md").read_text())
    (program,) = [text for kind, _, text in blocks if kind == "python"]
    after = blocks[[text for _, _, text in blocks].index(program) + 1]
    done = run(sys.executable, "-c", program)
    assert done.stdout == after[2], done.stderr[-2000:]
