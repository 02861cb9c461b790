"""Kernels for Hopper (sm_90) in Gluon. The roles inside a program, and where they are:

    `fetch`, or `gather`      `ring` of STAGES tiles of BLOCK_N keys     `fold`, with `softmax` and `mask`
    page ids ─► boxes of K ──► │ K0 │ K1 │ K2 │ … │ ── full ─────────►   1 to 3 warp groups of 64 packed `rows`,
    page ids ─► boxes of V ──► │ V0 │ V1 │ V2 │ … │ ── full ─────────►   which all fold the same tiles:
                                    ◄── free, K's before V's ─────────   s = q·kᵀ, softmax, acc += p·v

Who fetches runs ahead over the ends of requests, so a ring is never drained between them. `uniform`, `extend`,
`gathered` and `narrow` are the kernels, compiled for `constants`; `roles` starts who is in them, `bring` knows who
fetches, gathers or widens, `turned` folds what `narrow` keeps narrow, `agenda` hands EXTEND's row tiles out.
"""
