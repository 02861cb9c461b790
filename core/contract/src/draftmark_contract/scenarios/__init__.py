"""Canonical batches, and the rig that runs a backend on them.

`shapes` lists the geometries, `trees` and `turns` the batches (no torch up to here, so that cases can be listed
anywhere); `stage` turns a batch into tensors, `rig` drives the backend through them, `verify` says what must hold.

The fixtures are chosen so as not to hide bugs: the page table is wider than C, D differs from S + 1, k > 1 with
page_size > 1, page ids are shuffled, memory behind the live part is dirty, unused KV is NaN.
"""
