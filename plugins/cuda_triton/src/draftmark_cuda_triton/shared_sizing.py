"""What sibling plugins take from here before a backend is opened: the sizes of `shared.FewRows`. Integers, no torch.

These names and their arguments change with a major version only.
"""

from .sizing import few_rows_buffers, few_rows_usage

__all__ = ["few_rows_buffers", "few_rows_usage"]
