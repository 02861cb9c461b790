"""Proofs that a plugin's buffer sizes suffice for every batch within its limits.

The plugin's `buffers()` runs on symbolic integers (`symbols`) along every branch (`explore`), for a symbolic geometry
and batch (`domain`). Each extent becomes a claim ``needed <= declared`` (`theorems`). z3 proves or refutes the claims
in a process that can be killed (`solver`). The suite's checks by proof call `buffers` and `state`.
"""
