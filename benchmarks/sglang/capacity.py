"""Requests of a hybrid model that fit into a memory, by SGLang's own sizing code, with and without draftmark's states.

    python -m benchmarks.sglang.capacity OUT.json

No device is needed: a scheduler of a small model starts on a CPU as far as the sizes of its pools, with the
configuration of the large model and with a given memory for states and KV. Each case runs in a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import origin

from .arguments import ON_A_CPU
from .guessable_hybrid import write_hybrid

MODEL = "Qwen3-Next-80B-A3B"
MEMORY_GIB = (48, 96)
"""Memory for states and KV."""
DRAFTS: dict[str, dict[str, int]] = {
    "none": {},
    "chain of 3": dict(speculative_eagle_topk=1, speculative_num_steps=3, speculative_num_draft_tokens=4),
    "tree (4, 4, 16)": dict(speculative_eagle_topk=4, speculative_num_steps=4, speculative_num_draft_tokens=16),
    "tree (8, 6, 64)": dict(speculative_eagle_topk=8, speculative_num_steps=6, speculative_num_draft_tokens=64),
}
STATES = {"SGLang": "sglang", "draftmark": "cuda_triton"}
"""Values of DRAFTMARK_STATE_BACKEND by the name in a row."""
BFLOAT16_WINDOWS = {"SGLANG_MAMBA_CONV_DTYPE": "bfloat16"}
PREFIX = "capacity: "


def size(states: str, drafts: str, memory_gib: int) -> None:
    """Print the slots and requests of one case, and end the process."""
    from sglang.srt.configs import Qwen3NextConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.runtime_context import get_schedule
    from sglang.srt.server_args import ServerArgs

    from draftmark_sglang_judge.in_process import scheduler_of

    def sized(self: Any, _: int) -> None:
        """Size the pools for the large model: SGLang's default configuration has its sizes."""
        self.model_config.hf_config = Qwen3NextConfig(architectures=["Qwen3NextForCausalLM"], full_attention_interval=4)
        self.mambaish_config = self.model_config.hf_config
        self._handle_max_mamba_cache(float(memory_gib))
        slots = get_schedule().max_mamba_cache_size
        slots_of_a_request = self._calculate_mamba_ratio()
        found = dict(slots=slots, slots_of_a_request=slots_of_a_request, requests=slots // slots_of_a_request)
        print(PREFIX + json.dumps(found), flush=True)
        os._exit(0)

    KVCacheConfigurator._profile_available_bytes = sized
    ServerArgs._validate_mamba_extra_buffer = lambda *_: None  # it requires a GPU
    shape = DRAFTS[drafts]
    folder = write_hybrid(Path(tempfile.mkdtemp()) / "model", "float32", hidden_size=64, intermediate_size=64)
    scheduler_of(
        {"DRAFTMARK_STATE_BACKEND": STATES[states]},
        model_path=str(folder),
        device="cpu",
        dtype="bfloat16",
        attention_backend="draftmark",
        page_size=64,
        mamba_radix_cache_strategy="extra_buffer",
        max_running_requests=4096,
        disable_cuda_graph=True,
        **(dict(shape, speculative_algorithm="EAGLE") if shape else {}),
    )


def main() -> None:
    """Run all cases, and write their rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang.capacity")
    parser.add_argument("out", type=Path)
    parser.add_argument("--case", nargs=3, help="internal: run this case")
    options = parser.parse_args()
    if options.case is not None:
        size(options.case[0], options.case[1], int(options.case[2]))
    rows = []
    for memory, drafts, states in itertools.product(MEMORY_GIB, DRAFTS, STATES):
        command = [sys.executable, "-m", "benchmarks.sglang.capacity", str(options.out), "--case", states, drafts]
        environment = os.environ | ON_A_CPU | BFLOAT16_WINDOWS
        done = subprocess.run([*command, str(memory)], env=environment, capture_output=True, text=True, check=False)
        line = next((one for one in done.stdout.splitlines() if one.startswith(PREFIX)), None)
        if line is None:
            raise SystemExit(f"{states}, {drafts}: the scheduler gave no sizes:\n{done.stderr[-2000:]}")
        rows.append(dict(states=states, drafts=drafts, memory_gib=memory, **json.loads(line[len(PREFIX) :])))
        print(rows[-1], flush=True)
    about = dict(schema=1, model=MODEL, commit=origin.commit(), versions=origin.versions("sglang", "draftmark"))
    origin.write(options.out, about | dict(rows=rows))


if __name__ == "__main__":
    main()
