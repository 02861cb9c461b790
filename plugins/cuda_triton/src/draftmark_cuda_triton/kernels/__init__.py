"""The plugin's Triton kernels for any GPU. Every file also runs on the CPU, under TRITON_INTERPRET=1."""

from . import (
    chosen,
    combine,
    compact_kv,
    decode_verify,
    kv_write,
    prefill,
    prefill_schedule,
    tile_schedule,
    tree_tail,
    upcast_kv,
    verify_tree,
)

__all__ = [
    "chosen",
    "combine",
    "compact_kv",
    "decode_verify",
    "kv_write",
    "prefill",
    "prefill_schedule",
    "tile_schedule",
    "tree_tail",
    "upcast_kv",
    "verify_tree",
]
