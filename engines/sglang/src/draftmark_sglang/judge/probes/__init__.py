"""Metadata and sizes of SGLang's backends that cannot run on a CPU, asked of their own unmodified code.

Each module builds a backend's class without its constructor, which wants a device, sets what its methods read, calls
them on the CPU, and compares what they left with integers that follow from the batch alone.
"""
