"""Proofs that a plugin's own sizing covers every batch within its limits.

The plugin's `buffers()` runs on symbolic integers (`symbols`), branch by branch (`explore`), for a geometry and a
batch without values (`domain`); each extent becomes a claim ``needed <= declared`` (`theorems`), which z3 proves or
refutes in a process that can be killed (`solver`). Needs z3-solver: ``pip install 'draftmark-contract[proof]'``.
"""
