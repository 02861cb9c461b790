"""Stand-in for tests on a CPU: SGLang's compiled kernels that a dense text model needs, in torch."""

from draftmark_sglang_judge.absent import names_of, stand_in

from .slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
)
from .trees import build_tree_kernel_efficient_cpu, reconstruct_indices_from_tree_mask, verify_tree_greedy_cpu

__version__ = "0.4.5"
__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "reconstruct_indices_from_tree_mask",
    "verify_tree_greedy_cpu",
]

stand_in((__name__,))
__getattr__ = names_of(__name__)
