"""Gluon functions with names that differ between Triton 3.6 and 3.9."""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

SharedMemory = gl.shared_memory_descriptor

thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
reinterpret = SharedMemory.reinterpret if hasattr(SharedMemory, "reinterpret") else SharedMemory._reinterpret
cp_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
