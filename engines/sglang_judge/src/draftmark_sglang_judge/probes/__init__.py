"""Checks of metadata and buffer sizes of SGLang backends that cannot run on a CPU, computed by their unmodified code.

Each module creates a backend object without its constructor, which needs a device. It sets the attributes that the
methods read, calls the methods on the CPU, and compares the results with integers computed from the batch.
"""
