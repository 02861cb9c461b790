"""The commands that this distribution brings: `draftmark contract`, `draftmark prove` and `draftmark bench`."""
