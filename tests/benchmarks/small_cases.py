"""Small inputs that tests of several parts of a benchmark share."""

from __future__ import annotations

from benchmarks.attention.models import Model
from benchmarks.serving.workload import Workload

HEAD = {"shape": "small-shape", "backend": "CUSTOM:cuda_triton", "page_size": 16, "drafts": 4, "drafter": "eagle3"}
WORKLOAD = Workload("a", 1, requests=200, prompt=(50, 900), new=(8, 16))
SMALL = Model(4, 2, 16, 16)
LENS = (40, 15, 64)
