"""What sibling plugins take from here before a backend is opened: the sizes of `shared.DecodeVerify`. Integers, no
torch.

These names and their arguments change with a major version only.
"""

from .sizing import decode_verify_buffers, decode_verify_usage

__all__ = ["decode_verify_buffers", "decode_verify_usage"]
