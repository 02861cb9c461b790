"""Client process: sends a drawn workload to a server's OpenAI API and records when tokens arrive.

    python -m benchmarks.serving.client JOB.json ANSWERS.json

It shares no process with the server or the benchmark, and imports nothing heavy. `Job` describes JOB.json.
ANSWERS.json has one object for each request: ``at_s`` (arrival), ``prompt_tokens``, ``new_tokens``, ``chunks`` (a list
of seconds and tokens so far), ``zero_unix_s`` (Unix time of second 0) and, if the request failed, ``failed``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .workload import PERIOD, Request, Workload, draw

MODEL = "served"
"""Name under which every server offers its model."""


@dataclass(frozen=True)
class Job:
    """Task of a client.

    Attributes:
        url: address of the server.
        workload: fields of a `Workload`.
        vocabulary: number of token ids of the model.
        restrict: let a repetitive prompt be continued only with tokens of that prompt. A model with dummy weights would
            write other tokens, and n-gram look-up would find no drafts for them.
        silence_s: seconds without a byte after which a request has failed.
    """

    url: str
    workload: dict[str, Any]
    vocabulary: int
    restrict: bool = False
    silence_s: float = 120.0

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self)))


class ServerError(Exception):
    """The server's answer is an error."""


def body(request: Request, restrict: bool) -> dict[str, Any]:
    """Return the body of a request to ``/v1/completions``. Each chunk of the answer counts the tokens so far."""
    made: dict[str, Any] = {
        "model": MODEL,
        "prompt": request.prompt,
        "max_tokens": request.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if restrict and request.repeats:
        made["allowed_token_ids"] = sorted(set(request.prompt[:PERIOD]))
    return made


def tokens_so_far(line: bytes) -> int:
    """Return the number of new tokens that a line of an event stream counts, or 0 if it counts none.

    Raises:
        ServerError: the line reports an error.
    """
    data = line.strip().removeprefix(b"data:").strip()
    if not line.startswith(b"data:") or data == b"[DONE]":
        return 0
    event = json.loads(data)
    if event.get("error"):
        raise ServerError(str(event["error"]))
    return int((event.get("usage") or {}).get("completion_tokens", 0))


async def answers(job: Job) -> list[dict[str, Any]]:
    """Send the requests of a job at their arrival times, and return the answers in the order of arrivals."""
    import aiohttp

    workload = Workload(**job.workload)
    requests = draw(workload, job.vocabulary)
    bodies = [json.dumps(body(request, job.restrict)).encode() for request in requests]
    free = asyncio.Semaphore(workload.at_once)
    timeout = aiohttp.ClientTimeout(total=None, sock_read=job.silence_s)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        began, zero = time.perf_counter(), time.time()

        async def one(request: Request, sent: bytes) -> dict[str, Any]:
            await asyncio.sleep(max(0.0, began + request.at_s - time.perf_counter()))
            async with free:
                found = await _answer(session, f"{job.url}/v1/completions", request, sent, began)
                return found | {"zero_unix_s": zero}

        return list(await asyncio.gather(*map(one, requests, bodies)))


async def _answer(session: Any, url: str, request: Request, sent: bytes, began: float) -> dict[str, Any]:
    chunks: list[tuple[float, int]] = []
    found = {"at_s": request.at_s, "prompt_tokens": len(request.prompt), "new_tokens": request.new_tokens}
    try:
        async with session.post(url, data=sent, headers={"Content-Type": "application/json"}) as answer:
            if answer.status != 200:
                raise ServerError(f"status {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                tokens = tokens_so_far(line)
                if tokens > (chunks[-1][1] if chunks else 0):
                    chunks.append((time.perf_counter() - began, tokens))
    except Exception as error:  # one failed request is a result, and must not end the others
        found["failed"] = f"{type(error).__name__}: {error}"
    return found | {"chunks": chunks}


def main(job: Path, out: Path) -> None:
    """Run the job of a file, and write its answers."""
    found = asyncio.run(answers(Job(**json.loads(job.read_text()))))
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
