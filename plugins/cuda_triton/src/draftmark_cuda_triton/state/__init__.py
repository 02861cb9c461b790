"""Layers with recurrent state: kernels, their launches, and buffers (`draftmark.runtime.StateBackend`).

    backend.py              the five methods of a step (plan, write_metadata, convolve, recur, commit)
    sizing.py, support.py   buffers by name and size, block sizes; rejected layers. No torch
    convolve.py, recur.py, commit.py, extend.py   one function per kernel launch: grid, constants, arguments
    launching.py            a launch on a GPU, or interpreted on CPU tensors
    ../kernels/state_*.py   Triton kernels, any GPU from sm_80

A verify reads each committed state once and stores no state of a row. It stores records: the key, the update u and the
decay of each row. The commit adds the accepted rows' updates to the state.
"""
