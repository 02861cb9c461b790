"""Judges SGLang's linear-attention backends (GDN, KDA, Mamba2) in Triton's interpreter, without a running scheduler.

SGLang's own classes build the metadata, run the layers and commit. `pool` stands in for its state pool, which lies on a
GPU, and `driver` runs rounds.
"""
