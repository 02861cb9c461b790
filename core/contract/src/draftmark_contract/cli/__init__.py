"""The commands that this distribution brings: `draftmark contract` and `draftmark prove`."""
