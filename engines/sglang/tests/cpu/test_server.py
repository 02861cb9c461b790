"""Test of SGLang's HTTP server with draftmark, started by its command line and used through OpenAI's client."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

START = 600
"""Seconds that the server may take to start."""
PORTS = 3
"""Ports that are tried."""
IN_USE = ("address already in use", "is already in use", "is not available in")
"""Words of a server's log about a port that another process has taken."""
PROMPTS = (
    "The capital of France is",
    "One two three four five six",
    "Water boils at a temperature of",
    "A B C D E F G",
)


@pytest.fixture(scope="module")
def server(smollm2: str, folder: Path) -> Iterator[str]:
    """Address of a running SGLang server that uses draftmark with n-gram trees and page size 16."""
    arguments = ["--model-path", smollm2, "--attention-backend", "draftmark", "--page-size", "16"]
    arguments += ["--device", "cpu"]
    arguments += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6", "--dtype", "float32"]
    arguments += ["--max-total-tokens", "4096", "--max-running-requests", "4", "--mem-fraction-static", "0.6"]
    arguments += ["--skip-server-warmup", "--sampling-backend", "pytorch", "--disable-cuda-graph"]
    process, address = _started(arguments, folder / "server.log")
    try:
        yield address
    finally:
        _end(process)


def _started(arguments: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server on a free port, and return its process and address.

    If the server's log has the error that another process took the port, try another port.
    """
    for _ in range(PORTS):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with log.open("wb") as out:
            command = [sys.executable, "-m", "sglang.launch_server", *arguments, "--port", str(port)]
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        address = f"http://127.0.0.1:{port}"
        try:
            _wait(address, process, log)
            return process, address
        except AssertionError:
            _end(process)
            if not any(words in log.read_text(errors="replace").lower() for words in IN_USE):
                raise
    raise AssertionError(f"{PORTS} ports were taken by others before the server bound them")


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server responds, or fail if its process ends."""
    for _ in range(START):
        try:
            with urllib.request.urlopen(f"{address}/model_info", timeout=5):
                return
        except OSError:
            try:
                process.wait(timeout=1)
            except subprocess.TimeoutExpired:
                continue
            break
    raise AssertionError(f"the server did not start:\n{log.read_text(errors='replace')[-4000:]}")


def test_concurrent_and_cancelled_requests(server: str, smollm2: str) -> None:
    """Concurrent requests get the text that transformers generates, while other requests are cancelled."""
    import openai
    import torch
    import transformers

    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none")

    def ask(prompt: str) -> str:
        return client.completions.create(model=smollm2, prompt=prompt, max_tokens=12, temperature=0.0).choices[0].text

    def break_off(prompt: str) -> int:
        stream = client.completions.create(model=smollm2, prompt=prompt, max_tokens=200, temperature=0.0, stream=True)
        pieces = [next(iter(stream)) for _ in range(2)]
        stream.close()
        return len(pieces)

    with ThreadPoolExecutor(6) as pool:
        broken = [pool.submit(break_off, prompt) for prompt in PROMPTS[:2]]
        texts = list(pool.map(ask, PROMPTS))
        assert [one.result() for one in broken] == [2, 2]
    texts_again = [ask(prompt) for prompt in PROMPTS]
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    network = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    for prompt, text, again in zip(PROMPTS, texts, texts_again, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        made = network.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        assert text == again == tokenizer.decode(made, skip_special_tokens=True), prompt
