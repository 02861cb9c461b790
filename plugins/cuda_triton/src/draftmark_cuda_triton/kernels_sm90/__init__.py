"""Kernels for Hopper (sm_90) in Gluon. Import this package only where Gluon is present (`launch.tma.has_gluon`).

Warp specialization inside one CTA:

    producer_tma, producer_gather   pipeline: STAGES tiles of BLOCK_N keys   mainloop, with softmax and mask
    page ids ─► boxes of K ───────► │ K0 │ K1 │ K2 │ … │ ── full ─────────►  1 to 3 consumer warp groups of 64 packed
    page ids ─► boxes of V ───────► │ V0 │ V1 │ V2 │ … │ ── full ─────────►  rows (pack_gqa); all read the same tiles:
                                         ◄── empty, K before V ───────────   s = q·kᵀ, softmax, acc += p·v

The producer runs ahead across the ends of requests, so the pipeline never drains between requests.

Kernels: `decode_verify`, `decode_verify_fp8`, `decode_verify_gather`, `prefill`, `prefill_gather`, `latent`,
`latent_rs`, `latent_swap_ab`. Each is compiled for one `config.KernelConstants`. `warp_specialize` starts the
partitions, `producer` selects what a partition loads, `mma_fp8_swap_ab` is the mainloop of `decode_verify_fp8`, and
`tile_scheduler` distributes row tiles of prefill.
`kernels.combine`, `kernels.tile_schedule` and `kernels.prefill_schedule` serve Hopper too.
`state_verify` and `state_commit` serve layers with recurrent state, without partitions.
"""

from . import (
    decode_verify,
    decode_verify_fp8,
    decode_verify_gather,
    latent,
    latent_rs,
    latent_swap_ab,
    prefill,
    prefill_gather,
    state_commit,
    state_verify,
)

__all__ = [
    "decode_verify",
    "decode_verify_fp8",
    "decode_verify_gather",
    "latent",
    "latent_rs",
    "latent_swap_ab",
    "prefill",
    "prefill_gather",
    "state_commit",
    "state_verify",
]
