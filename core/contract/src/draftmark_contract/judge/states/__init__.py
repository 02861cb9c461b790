"""Judges layers with recurrent state (GDN, KDA, Mamba2) of an engine, in rounds of speculative decoding.

`driver` declares what an engine must provide, `layer` draws a layer and its rows, `subject` compares with the oracle,
and `questions` builds the items.
"""
