"""Runner of `draftmark contract`: runs items, keeps a journal of results, and computes the verdict."""
