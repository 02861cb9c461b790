"""Compiled kernels of draftmark-cuda-triton for common GPUs and models.

The folder ``kernels`` has the layout of `draftmark_cuda_triton.compiled.store`. The plugin searches it after its own
store. A kernel of another Triton version, architecture or source is never found here; it compiles as usual.
"""
