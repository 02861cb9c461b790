"""The training code lives beside the benchmarks, as scripts."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
