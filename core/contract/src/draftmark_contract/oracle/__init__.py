"""The metadata oracle: what a batch must mean, by brute force, and what a backend's buffers say it means.

`history` states the truth in tokens and slots, `truth` enumerates it, `decode` reads a backend's declared layout
into the same form, and `attention` computes outputs from either in float64. Nothing here calls a helper of the
geometry, of a plugin, or of the reference backend: an oracle that shares a formula shares its bugs.
"""
