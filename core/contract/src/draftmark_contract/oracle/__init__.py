"""The oracle: the correct result of a batch by brute force, and a decoder of the backend's buffers.

`history` describes requests in tokens and KV slots. `truth` enumerates the slots that each row sees and writes.
`decode` reads these slots from a backend's buffers, by the declared layout. `attention` computes outputs in float64
from the enumerated or the decoded slots.

Nothing here calls a helper of the geometry, of a plugin or of the reference backend, because an oracle with shared
formulas shares bugs.
"""
