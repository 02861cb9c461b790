"""Process that compiles kernels: ``python -m draftmark_cuda_triton.compiled.worker STORE``. No torch, no CUDA.

It reads pickled `KernelSource` objects from stdin, stores each compiled kernel, and answers each with one pickled
`Compiled` on stdout. `pool` starts it.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from typing import NoReturn

import triton

from .source import Compiled, KernelSource, key_parts
from .store import Store


def main() -> NoReturn:
    """Compile kernels until stdin ends, then end the process."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a print of the compiler must not damage the answers
    store = Store(Path(sys.argv[1]))
    while True:
        try:
            source: KernelSource = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # without the report of leaks that Triton's bindings print at exit
        start, error = time.perf_counter(), ""
        try:
            parsed = source.triton_source()
            found = key_parts(parsed, source.target, source.options)
            if found != source.parts:
                pairs = ((name, source.parts[name], value) for name, value in found.items())
                differ = "; ".join(f"{name} {ours!r}, here {value!r}" for name, ours, value in pairs if ours != value)
                raise RuntimeError(f"the starting process has another {differ}")
            compiled = triton.compile(parsed, target=source.target, options=source.options)
            store.put(source, compiled.metadata_group)
        except Exception as caught:  # one kernel must not end the compilation of the others
            error = f"{type(caught).__name__}: {' '.join(str(caught).split())}"
        pickle.dump(Compiled(source.key, source.name, time.perf_counter() - start, error), answers)
        answers.flush()


if __name__ == "__main__":
    main()
