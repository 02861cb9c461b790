"""Public sizing functions for sibling plugins: buffers and bytes of `shared.DecodeVerify`. No torch.

These names and their arguments change only with a major version.
"""

from .sizing import decode_verify_buffers, decode_verify_usage

__all__ = ["decode_verify_buffers", "decode_verify_usage"]
