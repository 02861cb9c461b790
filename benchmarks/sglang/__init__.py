"""Tokens a second of SGLang with draftmark's attention and with SGLang's own, on one machine, one after the other."""
