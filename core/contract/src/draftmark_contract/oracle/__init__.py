"""The oracle: what a batch must mean, by brute force, and what a backend's buffers mean.

`history` describes requests in tokens and KV slots. `truth` enumerates what each row sees and writes. `decode` reads a
backend's declared layout into the same form. `attention` computes outputs from either in float64. Nothing here calls a
helper of the geometry, of a plugin or of the reference backend, because an oracle with shared formulas shares bugs.
"""
