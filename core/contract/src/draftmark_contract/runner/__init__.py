"""Runs the items of `draftmark contract`, keeps a journal of results, and computes the verdict."""
