"""Tokens/s of SGLang with draftmark's attention and with SGLang's own backends, one server after another."""
