"""Stand-in for tests on a CPU: the functions of `sgl_kernel.trees` under another module name that SGLang imports."""

from . import __getattr__  # noqa: F401
from .trees import build_tree_kernel_efficient_cpu, reconstruct_indices_from_tree_mask, verify_tree_greedy_cpu

__all__ = ["build_tree_kernel_efficient_cpu", "reconstruct_indices_from_tree_mask", "verify_tree_greedy_cpu"]
